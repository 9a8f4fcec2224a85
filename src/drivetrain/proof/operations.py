"""The operations of one step of a recorded program, in a file, and the first with another result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.base import operations
from drivetrain.base.operations import first_other, innermost_line

_OWN = os.path.dirname(__file__) + os.sep
_WRAPPERS = ("recorded_backward", "recorded_next")
"""Functions of this package between the program and torch."""


class Operations(operations.Operations):  # type: ignore[no-untyped-call]
    """Records the operations that the program calls, not those of this package."""

    def __init__(self) -> None:
        super().__init__(_place)

    def write(self, path: Path) -> None:
        """Write what was recorded, for :func:`first_difference`."""
        path.write_text(json.dumps(self.found), encoding="utf-8")


class _Recorder(Exception):
    """This package called the operation."""


def _place(frame: Any) -> str | None:
    try:
        return innermost_line(_frames(frame))
    except _Recorder:
        return None


def _frames(frame: Any) -> Iterator[tuple[str, int]]:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) or name.endswith("child.py"):
            yield name, frame.f_lineno
        elif frame.f_code.co_name not in _WRAPPERS:
            raise _Recorder
        frame = frame.f_back


def first_difference(one: Path, other: Path, has_same_start: bool) -> str:
    """Say which operation of two recorded steps is the first that differs.

    Args:
        one: the file with the operations of the first run.
        other: that of the second run.
        has_same_start: whether both begin with the step before. Else what only one process did at its start, such as
            loading a checkpoint, is left out: operations are compared as far as the last ones have equal names.
    """
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (one, other))
    if not has_same_start:
        count = 0
        while count < min(len(old), len(new)) and old[-1 - count][0] == new[-1 - count][0]:
            count += 1
        old, new = old[len(old) - count :], new[len(new) - count :]
    if (index := first_other(old, new)) is None:
        return "no operation has another result: what differs was read or set before"
    name, _, place = new[index]
    if old[index][0] != name:
        return f"first operation that the other run has not: {name} in {place}"
    return f"first operation with another result: {name} in {place}"
