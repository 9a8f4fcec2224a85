"""Runs the command ``drivetrain exec`` for ``python -m drivetrain.compat``."""

import sys

from drivetrain.compat.command import main

sys.exit(main(prog="python -m drivetrain.compat"))
