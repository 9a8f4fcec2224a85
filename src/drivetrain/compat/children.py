"""Processes that a program starts inherit drivetrain.compat, through two environment variables.

``PYTHONPATH`` begins with the folder ``startup``, whose ``sitecustomize.py`` every Python imports at its start: the
children of multiprocessing with "spawn" and "forkserver", and ``subprocess.run([sys.executable, ...])``. This file
reads :data:`VARIABLE` and installs drivetrain.compat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "DRIVETRAIN_COMPAT"
"""The environment variable with the number switches, separated by commas, or "none"."""

GENERATION = f"{VARIABLE}_GENERATION"
"""The environment variable with the generation whose names are available; unset for the latest."""

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def inherit(switches: Sequence[str], generation: str = "") -> None:
    """Make processes that are started from now on install with these ``switches`` and this ``generation``."""
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
