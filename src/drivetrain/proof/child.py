"""Run a program and record its optimizer steps: ``python -m drivetrain.proof.child program.py ...``."""

from __future__ import annotations

import argparse
import json
import os
import sys

from drivetrain.cli.program import add_program_arguments, run_program
from drivetrain.proof.recorder import Recorder
from drivetrain.proof.records import VARIABLE


def main() -> int:
    """Run and record the program on the command line; :data:`VARIABLE` has the recorder's arguments."""
    parser = argparse.ArgumentParser("drivetrain prove-resume")
    add_program_arguments(parser)
    given = parser.parse_args()
    Recorder(**json.loads(os.environ[VARIABLE])).install()
    return run_program(given, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
