"""The operations of one step, each with a fingerprint of its result and the line of the program that called it."""

from __future__ import annotations

import json
import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.proof.fingerprints import digest, leaves

_TORCH, _OWN = (os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))
Operation = tuple[str, str, str]
"""Name, fingerprint of the result, and the place in the program with its source line."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation while it is active, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        if "empty" not in str(func) and (place := _place()) is not None:  # what is empty holds anything
            self.found.append((str(func), digest(leaves(result)), place))
        return result

    def write(self, path: Path) -> None:
        """Write what was recorded, for :func:`first_difference`."""
        path.write_text(json.dumps(self.found), encoding="utf-8")


def _place() -> str | None:
    """Return the innermost line in the working directory, else outside of torch; ``None`` if this package called."""
    frame: Any = sys._getframe(2)
    here, outside = os.getcwd() + os.sep, None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN) and not name.endswith("child.py"):
            if frame.f_code.co_name not in ("recorded_backward", "recorded_next", "__torch_dispatch__"):
                return None
        elif os.path.abspath(name).startswith(here):
            return _shown(os.path.relpath(name, here), name, frame.f_lineno)
        elif outside is None and not name.startswith((_TORCH, "<")):
            outside = _shown(name, name, frame.f_lineno)
        frame = frame.f_back
    return outside


def _shown(path: str, name: str, number: int) -> str:
    return f"{path}:{number}: {linecache.getline(name, number).strip()}"


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
    for (name, was, _), (other_name, now, place) in zip(old, new, strict=False):
        if name != other_name:
            return f"first operation that the other run has not: {other_name} in {place}"
        if was != now:
            return f"first operation with another result: {name} in {place}"
    return "no operation has another result: what differs was read or set before"
