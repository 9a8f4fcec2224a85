"""Where a process stands among the others of its job, and what they do together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from drivetrain.strategies.strategy import Strategy
from drivetrain.tree import map_leaves


class _HasStrategy(Protocol):
    @property
    def strategy(self) -> Strategy: ...


class RankFacts:
    """Where this process stands: for whoever has a ``strategy``, the Engine and the Trainer."""

    @property
    def global_rank(self: _HasStrategy) -> int:
        """Index of this process in the job."""
        return self.strategy.global_rank

    @property
    def local_rank(self: _HasStrategy) -> int:
        """Index of this process on its machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self: _HasStrategy) -> int:
        """Index of this machine in the job."""
        return self.strategy.node_rank

    @property
    def world_size(self: _HasStrategy) -> int:
        """How many processes train together."""
        return self.strategy.world_size

    @property
    def is_global_zero(self: _HasStrategy) -> bool:
        """Whether this process speaks for the job."""
        return self.strategy.is_global_zero

    def print(self: _HasStrategy, *args: Any, **kwargs: Any) -> None:
        """``print`` on global rank 0 only."""
        if self.strategy.is_global_zero:
            print(*args, **kwargs)


class Ranks(RankFacts):
    """The part of an Engine that speaks of processes; of one process, nothing is exchanged.

    Attributes:
        strategy: which knows the others.
    """

    strategy: Strategy

    # ---- between processes ---------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        self.strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src``, on every rank."""
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Every rank's tensors, stacked to ``(world_size, ...)``; of one process, ``data`` as it is.

        Args:
            data: a tensor, or a tree of them.
            group: the processes to ask; ``None``: all.
            sync_grads: let gradients flow back to the rank that each slice came from.
        """
        gather = self.strategy.all_gather
        return map_leaves(lambda leaf: gather(leaf, group, sync_grads) if isinstance(leaf, Tensor) else leaf, data)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of each tensor in ``data`` over the ranks; of one process, ``data`` as it is.

        Args:
            data: a tensor, or a tree of them; it is not changed.
            group: the processes that take part; ``None``: all.
            reduce_op: "mean", "sum", "min", "max", or a ``ReduceOp``.
        """
        reduce = self.strategy.reduce
        return map_leaves(lambda leaf: reduce(leaf, group, reduce_op) if isinstance(leaf, Tensor) else leaf, data)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """A block that rank 0 has finished before the others begin it.

        Args:
            local: rank 0 of each machine, for files that the machines do not share.
        """
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        try:
            yield
        finally:  # the others must not wait for one that failed
            if first:
                self.barrier()
            self.barrier()  # nobody runs on while others still work
