"""The values that a program reads from tensors. A run on real tensors records these values, and runs on fake tensors
use the recorded values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from drivetrain.base.tree import map_leaves

Key = tuple[str, str, str]
"""Identifies a read of a value: the line of the program, the running block, and the operation."""
MOST_UNKNOWN = 10_000
"""The maximum number of unknown values that a line can read. Without a maximum, a loop could wait forever for a certain
value.
"""


class UnreadableError(Exception):
    """The program needs the value of a fake tensor, and no value was recorded.

    Args:
        line: the line of the program.
        what: the operation.
    """

    def __init__(self, line: str, what: str) -> None:
        super().__init__(
            f"{line} needs the values of a tensor, for {what}, and a plan knows shapes only. Give the result a size "
            "that depends on shapes, or plan a program without this line."
        )


class Values:
    """The results of operations that depend on the values of tensors, in the order of the operations.

    Args:
        known: the recorded results by key. With ``None``, the first read raises an UnreadableError.
        records: whether this is the run on real tensors.
    """

    def __init__(self, known: dict[Key, list[Any]] | None, records: bool = False) -> None:
        self.known, self.records, self.ends = known or {}, records, known is None
        self._taken = Counter[Key]()

    def record(self, key: Key, result: Any) -> None:
        """Record the result of an operation. Of tensors, only the shapes are recorded."""
        self.known.setdefault(key, []).append(
            map_leaves(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, result)
        )

    def take(self, key: Key) -> tuple[bool, Any]:
        """Return two values: whether results are recorded for ``key``, and the next result, with new tensors. After the
        last result, start again with the first result.

        Raises:
            UnreadableError: no result is recorded for ``key``, and either ``known`` was ``None`` or there were already
                :data:`MOST_UNKNOWN` reads with this key.
        """
        at, self._taken[key] = self._taken[key], self._taken[key] + 1
        if found := self.known.get(key):
            return True, map_leaves(_new, found[at % len(found)])
        if self.ends or at == MOST_UNKNOWN:
            raise UnreadableError(key[0], key[2])
        return False, None


def _new(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def read_one_by_one() -> None:
    """Patch torch in this process, so that ``tolist()`` of a real tensor calls ``item()`` for each value, as
    ``tolist()`` of a fake tensor does.
    """

    def tolist(tensor: Tensor) -> Any:
        return [each.tolist() for each in tensor] if tensor.ndim else tensor.item()

    cast("Any", torch.Tensor).tolist = tolist
