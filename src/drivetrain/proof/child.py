"""A program's process, which ``drivetrain prove-resume`` starts: it records the steps of the program that it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys

from drivetrain.cli.program import add_program_arguments, run_program
from drivetrain.proof.recorder import Recorder
from drivetrain.proof.records import VARIABLE


def main() -> int:
    """Record the program on the command line, as :data:`VARIABLE` asks for."""
    parser = argparse.ArgumentParser("drivetrain prove-resume")
    add_program_arguments(parser)
    given = parser.parse_args()
    Recorder(**json.loads(os.environ[VARIABLE])).install()
    return run_program(given, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
