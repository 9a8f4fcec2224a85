"""Groups of ranks: the base class, a group with one process, and torch's process groups."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.base import torch_private
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.strategies import collectives
from drivetrain.strategies.peers import CURES, Checks, differing_names, peers_of
from drivetrain.strategies.waiting import store_of_job

R = TypeVar("R")


class Group(ABC):
    """A group of ranks of a job, from the view of one member.

    A subclass sets ``rank`` and ``ranks``, and defines :meth:`gather_objects` and :meth:`new`. All other methods use
    :meth:`gather_objects`. Override a method if the communication library has a faster operation. All members must call
    the same methods in the same order. A rank is always a global rank of the job.

    Attributes:
        rank: the rank of this process.
        ranks: the ranks of all members, including this process. Gathered values are in the order of ``ranks``.
        handle: the torch.distributed process group, for torch's functions; ``None``: all processes, or no group.
        checks: decides which calls of tensor collectives the members compare first; ``None``: all calls.
        machine: the group of the members on this machine; ``None`` until a save needs the group.
    """

    rank: int
    ranks: Sequence[int]
    handle: Any = None
    checks: Checks | None = None
    machine: Group | None = None

    @property
    def store(self) -> Any:
        """The store of the torch.distributed job; ``None`` if the job has none."""
        return None

    @property
    def can_divide_on_host(self) -> bool:
        """Whether smaller groups of these ranks can exchange objects in host memory, without using the devices."""
        return False

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """The index of this process in ``ranks``."""
        return self.ranks.index(self.rank)

    @abstractmethod
    def gather_objects(self, obj: Any) -> list[Any]:
        """Return every member's picklable ``obj``, on every member."""

    @abstractmethod
    def new(self, ranks: Sequence[int]) -> Group:
        """Return a group of some of this group's ranks. All members of the new group must call this method with the
        same ``ranks``. Other ranks need not call this method.

        Args:
            ranks: global ranks, including the rank of this process.
        """

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Return every member's ``tensor``, stacked to ``(size, *tensor.shape)``.

        Args:
            tensor: a tensor whose shape and dtype are the same on every member.
            sync_grads: let the gradient of each slice flow back to the member that passed the slice.
        """
        if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
            raise NotSupportedError(
                f"{type(self).__name__}.all_gather(sync_grads=True): this group does not pass gradients. Override "
                "all_gather in it, or gather tensor.detach()."
            )
        tensor = tensor.detach()
        return torch.stack([each.to(tensor.device) for each in self.gather_objects(tensor)])

    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        """Return the element-wise reduction of every member's tensor.

        Args:
            tensor: a tensor whose shape and dtype are the same on every member. The tensor is not changed.
            op: "mean", "sum", "min", "max", "product", or a ``ReduceOp``.
        """
        return collectives.reduction_of(self.all_gather(tensor.detach()), op)

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        """Return ``obj`` of rank ``src`` on every member; ``None`` means the first rank in ``ranks``."""
        src = self.ranks[0] if src is None else src
        return self.gather_objects(obj if src == self.rank else None)[self.ranks.index(src)]

    def gather_keyed(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Check that all members pass the same ``names``. Return every member's 1-D ``values``, one row for each
        member.

        Raises:
            ConfigurationError: the names differ. All members raise this error.
        """
        everyones = self.gather_objects((list(names), values.detach()))
        each = [theirs for theirs, _ in everyones]
        if any(theirs != each[0] for theirs in each):
            raise ConfigurationError(differing_names(each, self.ranks))
        shapes = {tuple(row.shape) for _, row in everyones}
        if len(shapes) > 1 or values.ndim != 1:
            raise ConfigurationError(
                f"gather_keyed() got values of the shapes {sorted(shapes)}. {CURES['gather_keyed']}"
            )
        return torch.stack([row.to(values.device) for _, row in everyones])

    def reduce_keyed(self, names: Sequence[str], sums: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Check that all members pass the same ``names``. Return the element-wise sum of all members' 1-D ``sums``, and
        the element-wise maximum of all members' 1-D ``most``.

        Raises:
            ConfigurationError: the names differ. All members raise this error.
        """
        rows = self.gather_keyed(names, torch.cat([sums, most]))
        return rows[:, : len(sums)].sum(0), rows[:, len(sums) :].amax(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all members. With ``all=False``, return whether ``decision`` is true
        on at least one member.
        """
        votes = self.gather_objects(bool(decision))
        return False not in votes if all else True in votes

    def barrier(self, name: str | None = None) -> None:
        """Wait until every member has called this method."""
        self.gather_objects(name)

    def wait_for_first(self, name: str) -> None:
        """Wait like :meth:`barrier`, but without a time limit, because the first rank may do long work, such as a
        download.
        """
        self.barrier(name)


class LoneGroup(Group):
    """A group of one process, without a process group; no method communicates."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ranks = (rank,)

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj]

    def new(self, ranks: Sequence[int]) -> Group:
        _check_members(self, ranks)
        return self

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        return (tensor if sync_grads else tensor.detach()).unsqueeze(0)

    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        collectives.operation_of(op)
        return tensor

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        return obj


class TorchGroup(Group):
    """A process group of torch.distributed.

    Args:
        handle: a process group that contains this process; ``None``: all processes.
        device: this process's device. A tensor is copied to this device for an exchange if the group's backends do not
            support the tensor's own device.
        checks: decides which calls of tensor collectives the ranks compare first; ``None``: all calls.
        timeout: the timeout of groups that :meth:`new` creates; ``None``: torch's default.
    """

    def __init__(
        self,
        handle: Any = None,
        device: torch.device | None = None,
        checks: Checks | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.handle = handle
        self.device = device
        self.checks = checks
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.ranks = dist.get_process_group_ranks(dist.group.WORLD if handle is None else handle)

    def new(self, ranks: Sequence[int]) -> Group:
        _check_members(self, ranks)
        if len(ranks) == 1:
            return LoneGroup(self.rank)
        self._check_other_groups(list(ranks))
        handle = dist.new_group(list(ranks), self.timeout, use_local_synchronization=True)
        return TorchGroup(handle, self.device, self.checks, self.timeout)

    def _check_other_groups(self, ranks: list[int]) -> None:
        """Check that torch will give the new group the same name on all ``ranks``. With different names, the ranks
        would deadlock.

        torch derives the name from ``ranks``, and from the number of process groups of this process.

        Raises:
            ConfigurationError: the ranks are in different numbers of groups. All ``ranks`` raise this error.
        """
        store = torch_private.default_store()
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        # how often this rank has asked for this group in this job
        times = store.add(f"drivetrain/group {name} by {self.rank}", 1)
        key, own = f"drivetrain/group {name}/{times}", str(len(torch_private.world.pg_names))
        store.set(f"{key}/{self.rank}", own)
        if store.compare_set(f"{key}/first", "", own).decode() != own:
            store.set(f"{key}/differs", "1")
        if store.add(f"{key}/count", 1) == len(ranks):
            store.set(f"{key}/all", "1")
        store.wait([f"{key}/all"])
        if store.check([f"{key}/differs"]):
            counts = [int(store.get(f"{key}/{rank}")) for rank in ranks]
            raise ConfigurationError(
                f"TorchGroup.new({ranks}): these ranks are in {', '.join(map(str, counts))} process groups, and torch "
                "can only make a group of ranks that are in equally many. Make as many groups on each rank before, or "
                "call torch.distributed.new_group on all ranks, and pass what it returns to TorchGroup."
            )

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        return self._exchange(collectives.all_gather, tensor, sync_grads)

    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return self._exchange(collectives.reduce, tensor, op)

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        return self._exchange(collectives.broadcast, obj, self.ranks[0] if src is None else src)

    def gather_objects(self, obj: Any) -> list[Any]:
        return self._exchange(collectives.gather_objects, obj)

    @property
    def can_divide_on_host(self) -> bool:
        return self.store is not None and "cpu" in dist.get_backend_config(self.handle)

    def gather_keyed(self, names: Sequence[str], values: Tensor) -> Tensor:
        return self._exchange(collectives.gather_keyed, names, values)

    def reduce_keyed(self, names: Sequence[str], sums: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        return self._exchange(collectives.reduce_keyed, names, sums, most)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._exchange(collectives.reduce_boolean_decision, decision, all)

    def barrier(self, name: str | None = None) -> None:
        self._exchange(collectives.barrier, name)

    @property
    def store(self) -> Any:
        return store_of_job()

    def wait_for_first(self, name: str) -> None:
        if (store := self.store) is None:
            self.barrier(name)
            return
        # how often this rank has called this method in this job
        times = store.add(f"drivetrain/{name} by {self.rank}", 1)
        key, pause = f"drivetrain/{name}/{times}", 0.001
        if store.add(key, 1) == self.size:
            store.set(f"{key}/all", "")
        while not store.check([f"{key}/all"]):  # a blocking wait would ignore Ctrl-C
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _exchange(self, function: Callable[..., R], *args: Any) -> R:
        name = function.__name__
        peers = peers_of(name, self.handle, self.device, self.checks)
        if peers is None:  # the group has only this process
            alone: R = getattr(LoneGroup(self.rank), "all_reduce" if name == "reduce" else name)(*args)
            return alone
        try:
            return function(peers, *args)
        except ConfigurationError:  # if the members have made different calls, their counts of calls may differ
            if self.checks is not None:
                self.checks.restart(self.handle)
            raise


class WaitingGroup(Group):
    """A group whose ranks are known, but whose process group does not exist yet; collectives raise an error.

    Args:
        rank, ranks: as for every group.
        error: the exception that collectives raise.
    """

    def __init__(self, rank: int, ranks: Sequence[int], error: Callable[[], Exception]) -> None:
        self.rank = rank
        self.ranks = ranks
        self._error = error

    def gather_objects(self, obj: Any) -> list[Any]:
        raise self._error()

    def new(self, ranks: Sequence[int]) -> Group:
        _check_members(self, ranks)
        return WaitingGroup(self.rank, ranks, self._error)


def all_or_alone(group: Group, ranks: Sequence[int], why: str) -> Group:
    """Return ``group`` if ``ranks`` are all ranks of ``group``. If ``ranks`` is only this rank, return a group with one
    process. Some communication libraries cannot create other groups.

    Raises:
        NotSupportedError: ``ranks`` are neither all ranks of ``group`` nor this rank alone. The message ends with
            ``why``.
    """
    if list(ranks) == list(group.ranks):
        return group
    if list(ranks) == [group.rank]:
        return LoneGroup(group.rank)
    raise NotSupportedError(f"{type(group).__name__}.new({list(ranks)}): {why}")


def _check_members(group: Group, ranks: Sequence[int]) -> None:
    """Check that ``group`` can create a group of ``ranks``.

    Raises:
        ConfigurationError: a rank is not in ``group``, or this process is not among ``ranks``.
    """
    missing = [rank for rank in ranks if rank not in group.ranks]
    if missing or group.rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigurationError(
            f"{type(group).__name__}.new({list(ranks)}) was called on rank {group.rank} of a group of the ranks "
            f"{list(group.ranks)}. Give different ranks of the group, this one among them."
        )
