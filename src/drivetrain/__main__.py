"""The command ``drivetrain`` as ``python -m drivetrain``, for where its folder is not in ``PATH``."""

from __future__ import annotations

import sys

from drivetrain.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
