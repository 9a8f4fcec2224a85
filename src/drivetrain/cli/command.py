"""The command ``drivetrain``: one subcommand per entry of :data:`COMMANDS`, imported when it is called.

To add a subcommand, write a function ``(arguments, prog)`` that returns an exit code, and add a line to
:data:`COMMANDS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import drivetrain
from drivetrain.base.registry import load
from drivetrain.errors import did_you_mean


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        function: the function's location, as ``"module:name"``; it is called with ``(arguments, prog)``.
        help: one line for ``drivetrain --help``.
    """

    function: str
    help: str


COMMANDS: dict[str, Command] = {
    "checkpoint": Command(
        "drivetrain.cli.checkpoint_command:main", "inspect, verify, compare, convert, prune checkpoints"
    ),
    "conformance": Command(
        "drivetrain.cli.conformance:main", "check a part of your own against the contract of its kind"
    ),
    "devices": Command("drivetrain.cli.devices:main", "list the hardware that can be used here"),
    "diff": Command("drivetrain.proof.diff_command:main", "find the first step in which two recorded runs differ"),
    "exec": Command("drivetrain.compat.command:main", "run a program that was written for Lightning"),
    "goodput": Command("drivetrain.cli.goodput:main", "show where the wall time of a training went, over its restarts"),
    "migrate": Command("drivetrain.legacy.migrate.command:main", "rewrite programs that were written for Lightning"),
    "prove-resume": Command("drivetrain.proof.command:main", "kill a program, start it again, and compare every step"),
    "fit": Command("drivetrain.cli.fit:main", "train a model of a file or a configuration"),
    "validate": Command("drivetrain.cli.fit:main", "one pass over the validation data"),
    "test": Command("drivetrain.cli.fit:main", "one pass over the test data"),
    "predict": Command("drivetrain.cli.fit:main", "the model's outputs for the prediction data"),
    "run": Command("drivetrain.cli.run:main", "run a program with a loop of its own on hardware chosen here"),
    "stacks": Command("drivetrain.cli.stacks:main", "show where the ranks of a running job are and wait"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script: find the subcommand and call it.

    Args:
        arguments: the words after "drivetrain" on the command line; ``None``: ``sys.argv[1:]``.

    Returns:
        The process's exit code. Wrong usage ends in ``SystemExit(2)``, ``--help`` in ``SystemExit(0)``, as with
        argparse.
    """
    listed = "\n".join(f"  {name:<14}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "drivetrain", description="One PyTorch training program, whatever drives it.", epilog=f"commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"drivetrain {drivetrain.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see: drivetrain COMMAND --help")
    given = parser.parse_args(arguments)
    if given.command not in COMMANDS:
        parser.error(f"there is no command {given.command!r}. {did_you_mean(given.command, COMMANDS)}")
    function: Callable[[Sequence[str], str], int] = load(COMMANDS[given.command].function)
    return function(given.arguments, f"drivetrain {given.command}")


if __name__ == "__main__":
    sys.exit(main())
