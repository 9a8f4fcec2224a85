"""Sets environment variables so that child processes of a program use drivetrain.compat, too.

The first entry of ``PYTHONPATH`` is the folder ``startup``. A child process of multiprocessing or
``subprocess.run([sys.executable, ...])`` imports ``sitecustomize.py`` from this folder when it starts.
``sitecustomize.py`` reads :data:`VARIABLE` and installs drivetrain.compat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "DRIVETRAIN_COMPAT"
"""The environment variable with the switches of :func:`inherit`, separated by commas; "none" if there are none."""

GENERATION = f"{VARIABLE}_GENERATION"
"""The environment variable with the Lightning version whose names are provided, such as "1.3". Unset for 2.6."""

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def inherit(switches: Sequence[str], generation: str = "") -> None:
    """Set environment variables that make new child processes call ``compat.install`` with these arguments."""
    os.environ[VARIABLE] = ",".join(switches) or "none"
    os.environ.pop(GENERATION, None)
    if generation:
        os.environ[GENERATION] = generation
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *_others()])


def forget() -> None:
    """Undo :func:`inherit`."""
    os.environ.pop(VARIABLE, None)
    os.environ.pop(GENERATION, None)
    if others := _others():
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def inherited() -> tuple[list[str], str]:
    """Return the switches in :data:`VARIABLE` and the generation in :data:`GENERATION`."""
    switches = [name for name in os.environ.get(VARIABLE, "").split(",") if name and name != "none"]
    return switches, os.environ.get(GENERATION, "")


def _others() -> list[str]:
    path = os.environ.get("PYTHONPATH", "")
    return [entry for entry in path.split(os.pathsep) if entry != _STARTUP] if path else []
