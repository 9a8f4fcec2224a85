"""Record the operations that torch runs. Each record has a fingerprint of the result and the line of the program."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.base.digest import digest, leaves
from drivetrain.base.torch_private import DispatchMode

_TORCH = os.path.dirname(torch.__file__) + os.sep
Operation = Sequence[str]
"""The operation's name, the fingerprint of its result, and its place in the program, such as "train.py:12: loss =
f(x)".
"""


class Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation that runs while this mode is active, also in the backward pass.

    Collectives are left out, because their results may not be complete yet.

    Args:
        place: a function that returns the program line of an operation, such as "train.py:12: loss = f(x)". The
            function gets the frame that called the operation, or ``None`` in a thread of torch. If the function returns
            ``None``, the operation is left out.
    """

    def __init__(self, place: Callable[[Any], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        # torch.empty and similar operations return arbitrary values
        if "empty" not in str(func) and (place := self._place(sys._getframe().f_back)) is not None:
            self.note(func, args, kwargs or {}, result, place)
        return result

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, place: str) -> None:
        """Record an operation that has run."""
        if "c10d" not in func.namespace:
            self.found.append((str(func), digest(leaves(result)), place))


def innermost_line(places: Iterable[tuple[str, int]]) -> str | None:
    """Return the innermost line of a file below the working directory, such as "train.py:12: loss = f(x)". If there is
    none, return the innermost line outside torch.

    Args:
        places: the files and line numbers of a call stack, the innermost first.
    """
    here, outside = os.path.join(os.getcwd(), ""), None
    for name, number in places:
        # skip this file and torch, which may be installed below the working directory
        if name == __file__ or name.startswith((_TORCH, "<")):
            continue
        path = os.path.abspath(name)
        if path.startswith(here) and f"{os.sep}site-packages{os.sep}" not in path:
            return _shown(os.path.relpath(name, here), name, number)
        if outside is None:
            outside = _shown(name, name, number)
    return outside


def _shown(path: str, name: str, number: int) -> str:
    return f"{path}:{number}: {linecache.getline(name, number).strip()}"


def first_other(old: Sequence[Operation], new: Sequence[Operation]) -> int | None:
    """Return the first index at which ``old`` and ``new`` differ in the operation's name or result; ``None`` if there
    is none.
    """
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (one, other) in pairs if [*one[:2]] != [*other[:2]]), None)
