"""The command ``drivetrain run``: runs a program with its own loop on the hardware chosen on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from drivetrain.cli.program import add_program_arguments, run_program
from drivetrain.engine.command_line import COMMAND_LINE_PREFIX

# Arguments of Engine() that come from the command line if the program omits them, each with a line of help.
_OF_ENGINE = {
    "accelerator": "what to run on, such as cpu or auto",
    "strategy": "how the model lives on its devices, such as ddp or auto",
    "devices": "how many, their indices as in 0,1, or auto",
    "num_nodes": "machines that take part",
    "precision": "how numbers are kept, such as bf16-mixed",
}

# Variables through which several machines find each other.
_OF_CLUSTER = {
    "node_rank": ("NODE_RANK", "which of the machines this is, from 0"),
    "main_address": ("MASTER_ADDR", "where the first machine is reached"),
    "main_port": ("MASTER_PORT", "and on which port"),
}


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain run") -> int:
    """Export the options in ``arguments``, and run the program that they name.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        The exit code, if the program does not exit itself.
    """
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [OPTION ...] PROGRAM [ARGUMENT ...]\n       %(prog)s [OPTION ...] -m MODULE [ARGUMENT ...]",
        "Run a program that makes an Engine, with these choices in place of the Engine's defaults.",
        allow_abbrev=False,
    )
    for name, text in (*_OF_ENGINE.items(), *((name, text) for name, (_, text) in _OF_CLUSTER.items())):
        kind = int if name in ("num_nodes", "node_rank", "main_port") else str
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, help=text)
    add_program_arguments(parser)
    given = parser.parse_args(arguments)

    variables = {name: f"{COMMAND_LINE_PREFIX}{name.upper()}" for name in _OF_ENGINE}
    variables.update((name, variable) for name, (variable, _) in _OF_CLUSTER.items())
    for name, variable in variables.items():
        if (value := getattr(given, name)) is not None:
            os.environ[variable] = str(value)
    return run_program(given, prog)
