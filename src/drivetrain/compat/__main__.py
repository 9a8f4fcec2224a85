"""``python -m drivetrain.compat``: the same as ``drivetrain exec``."""

import sys

from drivetrain.compat.command import main

sys.exit(main(prog="python -m drivetrain.compat"))
