"""Record the operations that torch runs, each with a fingerprint of its result and the line of the program that called
it.
"""

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
"""The operation's name, the fingerprint of its result, and the place in the program with the source line."""


class Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation that runs while this mode is active, including those of the backward pass.

    Collectives are left out, because their results may not be complete yet.

    Args:
        place: returns the place of an operation; its argument is the frame that called the operation, or ``None`` in a
            thread of torch. If ``place`` returns ``None``, the operation is left out.
    """

    def __init__(self, place: Callable[[Any], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        # not recorded: operations that return an empty tensor, whose values are arbitrary
        if "empty" not in str(func) and (place := self._place(sys._getframe().f_back)) is not None:
            self.note(func, args, kwargs or {}, result, place)
        return result

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, place: str) -> None:
        """Record an operation that has run."""
        if "c10d" not in func.namespace:
            self.found.append((str(func), digest(leaves(result)), place))


def innermost_line(places: Iterable[tuple[str, int]]) -> str | None:
    """Return the place and the text of the innermost line in the working directory; if there is no such line, of the
    innermost line outside torch.

    Args:
        places: files and line numbers, the innermost first.
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
    """Return the index of the first operation in ``new`` whose name or result differs from the operation at the same
    index in ``old``.
    """
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (one, other) in pairs if [*one[:2]] != [*other[:2]]), None)
