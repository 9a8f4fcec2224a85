"""Values that a program reads from tensors. A pass with real values records what is read, and passes on fake tensors
use the recorded values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from drivetrain.base.tree import map_leaves

Key = tuple[str, str, str]
"""Identifies a read: the line of the program, the block that runs, and the operation."""
MOST_UNKNOWN = 10_000
"""The most unknown values that a line may read. The limit ends a loop that would wait for a certain value forever."""


class UnreadableError(Exception):
    """The program needs a value of a fake tensor, and none was recorded.

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
    """Results of operations that depend on the values of tensors, in their order.

    Args:
        known: the recorded results by key; ``None``: there are none, and the first read ends the pass.
        records: whether this is the pass with real values.
    """

    def __init__(self, known: dict[Key, list[Any]] | None, records: bool = False) -> None:
        self.known, self.records, self.ends = known or {}, records, known is None
        self._taken = Counter[Key]()

    def record(self, key: Key, result: Any) -> None:
        """Keep the result of a read: a number, or the shapes of tensors."""
        self.known.setdefault(key, []).append(
            map_leaves(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, result)
        )

    def take(self, key: Key) -> tuple[bool, Any]:
        """Return whether a result was recorded for the next read, and this result with new tensors. After the last
        recorded result, the first follows again.

        Raises:
            UnreadableError: no result is known, and either this ends the pass, or the line has read
                :data:`MOST_UNKNOWN` unknown values.
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
    """Patch torch, in this process: ``tensor.tolist()`` of a real tensor then calls ``item()`` for each value, as that
    of a fake tensor does.
    """

    def tolist(tensor: Tensor) -> Any:
        return [each.tolist() for each in tensor] if tensor.ndim else tensor.item()

    cast("Any", torch.Tensor).tolist = tolist
