"""The command ``drivetrain run``: run a program that uses an Engine, and choose the hardware on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from drivetrain.cli.program import add_program_arguments, program_parser, run_program
from drivetrain.engine.command_line import COMMAND_LINE_PREFIX

_OPTIONS: dict[str, tuple[str, type, str]] = {
    # Engine() reads these variables for arguments that the program does not pass
    "accelerator": (f"{COMMAND_LINE_PREFIX}ACCELERATOR", str, "what to run on, such as cpu or auto"),
    "strategy": (f"{COMMAND_LINE_PREFIX}STRATEGY", str, "how the model is spread over devices, such as ddp or auto"),
    "devices": (f"{COMMAND_LINE_PREFIX}DEVICES", str, "their number, their indices such as 0,1, or auto"),
    "num_nodes": (f"{COMMAND_LINE_PREFIX}NUM_NODES", int, "the number of machines"),
    "precision": (f"{COMMAND_LINE_PREFIX}PRECISION", str, "the numeric precision, such as bf16-mixed"),
    # with these variables, processes on different machines find each other
    "node_rank": ("NODE_RANK", int, "the index of this machine, from 0"),
    "main_address": ("MASTER_ADDR", str, "the address of the first machine"),
    "main_port": ("MASTER_PORT", int, "the port of the first machine"),
}
"""For each option: the environment variable that gets the value, the value's type, and a line of help."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = program_parser(
        prog, "Run a program that makes an Engine, with these choices in place of the Engine's defaults."
    )
    for name, (_, kind, text) in _OPTIONS.items():
        made.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, help=text)
    add_program_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain run") -> int:
    """Write the options to environment variables, and run the program.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0, or 2 if the program's file does not exist. Exceptions of the program and ``SystemExit`` are not caught.
    """
    given = parser(prog).parse_args(arguments)
    for name, (variable, _, _) in _OPTIONS.items():
        if (value := getattr(given, name)) is not None:
            os.environ[variable] = str(value)
    return run_program(given, prog)
