"""``killed.py COUNT PROGRAM ARGUMENTS``: run a program that kills itself when it is about to print its COUNT-th step.

It changes ``print`` alone, and knows nothing of drivetrain or of torch's hooks. COUNT 0 never kills.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

kill_at, program = int(sys.argv[1]), sys.argv[2]
plain_print, steps = print, 0


def counting_print(*values: Any, **options: Any) -> None:
    global steps
    steps += str(values[0]).startswith("step ")
    if steps == kill_at and kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    plain_print(*values, **options)


builtins.print = counting_print
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")
