"""The process that ``drivetrain prove-resume`` starts. The process runs a program, and records the program's optimizer
steps.
"""

from __future__ import annotations

import json
import os
import sys

from drivetrain.cli.program import parse_program, run_program
from drivetrain.proof.recorder import Recorder
from drivetrain.proof.records import VARIABLE

PROG = "drivetrain prove-resume"


def main() -> int:
    """Run and record the program on the command line. The environment variable :data:`VARIABLE` contains the recorder's
    arguments.
    """
    given = parse_program(PROG)
    Recorder(**json.loads(os.environ[VARIABLE])).install()
    return run_program(given, PROG)


if __name__ == "__main__":
    sys.exit(main())
