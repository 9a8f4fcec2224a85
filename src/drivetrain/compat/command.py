"""The command ``drivetrain exec``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drivetrain import compat, parity
from drivetrain.cli.program import add_program_arguments, program_parser, run_program
from drivetrain.compat import table
from drivetrain.errors import ConfigurationError


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = program_parser(
        prog, "Run a program that was written for Lightning on drivetrain.", "[--numbers NAMES] [--generation VERSION]"
    )
    made.add_argument(
        "--numbers", default="", metavar="NAMES",
        help=f"compute as Lightning does where drivetrain differs: original, or some of {', '.join(parity.NUMBERS)}, "
        "with commas between them",
    )  # fmt: skip
    made.add_argument(
        "--generation", default="", metavar="VERSION",
        help=f"the version of Lightning that the program was written for: {', '.join(table.GENERATIONS)}; by default 2",
    )  # fmt: skip
    add_program_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain exec") -> int:
    """Install :mod:`drivetrain.compat`, and run the program that ``arguments`` names.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        The exit code, unless the program ends with :func:`sys.exit`.
    """
    made = parser(prog)
    given = made.parse_args(arguments)
    try:
        compat.install(given.numbers, given.generation)
    except ConfigurationError as error:
        made.error(str(error))
    return run_program(given, prog)
