"""Let the ranks of a collective compare their calls first, and then exchange bytes."""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.errors import ConfigurationError, DrivetrainError, first_of
from drivetrain.strategies import waiting

_DIGEST = 16  # bytes
# A rank sends three values about its call: whether the rank has failed, a digest of the call's text, and the beginning
# of the text.
_HEADER = struct.Struct(f"<?{_DIGEST}s239s")
_WORDS = struct.Struct("<2Q")  # unpacks a digest as two numbers
_NUMBERS = 2  # how many ``numbers`` a call can send with its description
_LONGEST_LIST = 8  # the largest number of names or ranks in a message
_CHECKED_FIRST = 100  # by default, a run checks this many tensor collectives for each group

COMPARISON = "compare_ranks"  # the text of this call is the name of a Trainer's method, such as fit, and digests

CURES = {
    "all_gather": "Pad the tensors to one shape, in one dtype, or use gather_objects().",
    "broadcast": "Pass the same global rank of the group as src on every rank, and there a picklable object.",
    "reduce": "Pass tensors of the same shape and dtype, and the same operation, on every rank.",
    "barrier": "Call the same barriers in the same order on every rank.",
    "reduce_boolean_decision": "Pass the same value of all on every rank.",
    "gather_objects": "Pass objects that can be pickled on every rank.",
    "reduce_keyed": "Pass the same names, and the same count and dtype of numbers, on every rank.",
    "gather_keyed": "Pass the same names, and one row with the same count and dtype of numbers, on every rank.",
}


@dataclass(frozen=True)
class Row:
    """The call that one rank wants to make."""

    failed: bool
    digest: bytes
    text: str

    @property
    def call(self) -> str:
        """The name of the function that the rank has called."""
        return self.text.partition("(")[0]

    @property
    def shown(self) -> str:
        """A description of the call, for a message."""
        return _shown(self.text)


class Checks:
    """Decides which calls of tensor collectives the ranks compare before the exchange: a run's first calls, all calls,
    or no calls.

    Each group has its own count of calls. The members of a group make the same calls, so all members check the same
    calls.

    Args:
        check: ``None``: the first 100 calls in each group; True: all calls; False: none.
    """

    def __init__(self, check: bool | None = None) -> None:
        self.check = check
        self._done: dict[str, int] = {}

    def start_run(self, check: bool | None) -> None:
        """Reset the count of calls of every group, and use ``check`` from now on."""
        self.check = check
        self._done.clear()

    def due(self, group: Any) -> bool:
        """Return whether the next call in ``group`` is checked, and count the call."""
        if self.check is not None:
            return self.check
        name = _name_of(group)
        self._done[name] = self._done.get(name, 0) + 1
        return self._done[name] <= _CHECKED_FIRST

    def restart(self, group: Any) -> None:
        """Reset the count of calls of ``group``. Call this method after the members have made different calls, because
        their counts may differ.
        """
        self._done.pop(_name_of(group), None)


def _name_of(group: Any) -> str:
    """Return the name of ``group``. The name is the same on all members."""
    handle: Any = dist.group.WORLD if group is None else group
    return handle.group_name


@dataclass(frozen=True)
class Peers:
    """The ranks of one call of a collective, at least two.

    Attributes:
        call: the name of the function.
        group: the process group; ``None``: all processes.
        ranks: the members' global ranks, in the group's order.
        rank: the rank of this process.
        device: the device to which a tensor is copied if the group does not support the tensor's own device.
        checks: decides which calls of tensor collectives are checked; ``None``: all calls.
    """

    call: str
    group: Any
    ranks: list[int]
    rank: int
    device: torch.device | None
    checks: Checks | None = None

    def agree_on_tensor(self, text: str, problem: str | None) -> None:
        """Call :meth:`agree` if ``checks`` selects this call. Only for a collective that exchanges a single tensor.

        Args:
            text: describes this rank's call.
            problem: why this rank cannot make the call; ``None``: no problem.

        Raises:
            ConfigurationError: as in :meth:`agree`. If the call is not checked, only the rank with a problem raises
                this error.
        """
        if self.checks is None or self.checks.due(self.group):
            self.agree(problem or text, failed=problem is not None)
        elif problem is not None:
            raise ConfigurationError(f"{self.call}() got {problem} on rank {self.rank}. {CURES[self.call]}")

    def agree(self, text: str, *numbers: int, failed: bool = False) -> list[tuple[int, int]]:
        """Check that all ranks make the same call. For each of ``numbers``, return the smallest and the largest value
        over the ranks.

        Raises:
            ConfigurationError: on every rank, if the texts differ or a rank passes ``failed=True``.
        """
        rows, ranges = self.meet(text, *numbers, failed=failed)
        self.check(rows)
        return ranges

    def meet(
        self, text: str, *numbers: int, failed: bool = False, also: str = ""
    ) -> tuple[list[Row], list[tuple[int, int]]]:
        """Return the calls of all ranks, or only this rank's call if all calls are equal. Also return, for each of
        ``numbers``, the smallest and the largest value over the ranks.

        The ranks first compare digests of their calls, in an exchange whose size does not depend on the number of
        ranks. If the digests differ, the ranks exchange the calls themselves.

        Args:
            text: describes this rank's call.
            numbers: up to two integers of the call that may differ between ranks.
            failed: whether this rank cannot make the call.
            also: a further text that the ranks compare. Error messages do not show this text.
        """
        text = f"{self.call}({text})"
        digest = hashlib.sha256(f"{text}\0{also}".encode()).digest()[:_DIGEST]
        own = [int(failed), *(word >> 1 for word in _WORDS.unpack(digest)), *numbers]
        own += [0] * (_NUMBERS - len(numbers))
        most = torch.tensor([*own, *(-value for value in own)], device="cpu")
        most = most.to(self.wire(most.device))
        try:
            self._spread_largest(most, _shown(text))
            largest = most.tolist()
            ranges = [(-low, high) for high, low in zip(largest[: len(own)], largest[len(own) :], strict=True)]
            row = Row(failed, digest, text)
            (_, has_failed), *words = ranges[:3]
            if not has_failed and all(low == high for low, high in words):
                return [row], ranges[3:]
            header = bytearray(_HEADER.pack(failed, digest, text.encode()))
            received = self.gather(torch.frombuffer(header, dtype=torch.uint8)).cpu()
        except RuntimeError as error:
            raise DrivetrainError(
                f"Rank {self.rank} waited in {_shown(text)} for {_ranks(self.ranks)}, and not all came: {error}. A "
                "rank has failed, or is doing something else. Make this call on every rank of the group, outside "
                "of conditions that differ between ranks. [DT1057]"
            ) from error
        return [
            # the text may be cut inside a character
            Row(failed, digest, beginning.rstrip(b"\0").decode(errors="ignore"))
            for failed, digest, beginning in _HEADER.iter_unpack(as_bytes(received))
        ], ranges[3:]

    def _spread_largest(self, values: Tensor, waits_in: str) -> None:
        """Set each of ``values`` to its maximum over the ranks. The size of the exchange does not depend on the number
        of ranks.

        The exchange is a reduction and a broadcast instead of an all_reduce. If another rank skipped this call and
        all-reduced its gradients, Gloo would match the two all_reduce calls.
        """
        first = self.ranks[0]
        for exchange in (partial(dist.reduce, dst=first, op=dist.ReduceOp.MAX), partial(dist.broadcast, src=first)):
            if values.device.type == "cpu":
                waiting.finish(exchange(values, group=self.group, async_op=True), self.group, self.ranks, waits_in)
            else:
                exchange(values, group=self.group)

    def check(self, rows: list[Row]) -> None:
        """Raise an error, on every rank, if the rows differ or a rank has failed."""
        if not any(row.failed for row in rows) and len({row.digest for row in rows}) == 1:
            return
        calls = {row.call for row in rows}
        cure = CURES[calls.pop()] if len(calls) == 1 else "Make the same calls in the same order on every rank."
        each = by_rank([row.shown for row in rows], self.ranks)
        raise ConfigurationError(f"The ranks of the group cannot do this together: {each}. {cure}")

    def gather(self, row: Tensor) -> Tensor:
        """Return every rank's ``row`` of bytes. All rows must have the same length."""
        row = row.to(self.wire(row.device))
        rows = row.new_empty(len(self.ranks), row.numel())
        if row.numel():
            dist.all_gather(list(rows.unbind()), row, group=self.group)
        return rows

    def send(self, row: Tensor, src: int) -> Tensor:
        """Return the bytes of rank ``src``, on the device of ``row``. On all other ranks, ``row`` must have the same
        length, and its content is ignored.
        """
        on_wire = row.to(self.wire(row.device))
        if row.numel():
            dist.broadcast(on_wire, src, group=self.group)
        return on_wire.to(row.device)

    def all_reduce(self, values: Tensor, op: Any) -> Tensor:
        """Return the reduction of ``values``, on the device of ``values``. The tensor ``values`` may be overwritten."""
        on_wire = values.to(self.wire(values.device))
        if values.numel():
            dist.all_reduce(on_wire, op, group=self.group)
        return on_wire.to(values.device)

    def wire(self, device: torch.device) -> torch.device:
        """Return the device to which tensors on ``device`` must be copied for an exchange."""
        reached = [pair.partition(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
        if device.type in reached:
            return device
        if self.device is not None and self.device.type in reached:
            return self.device
        return torch.device("cpu" if "cpu" in reached else reached[0])


def peers_of(call: str, group: Any, device: torch.device | None, checks: Checks | None = None) -> Peers | None:
    """Return the ranks of ``group``, or ``None`` if this process is the only member."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank = dist.get_rank()
    if dist.get_rank(group) < 0:
        raise ConfigurationError(
            f"{call}() was called on rank {rank}, which is not a member of the given group. Call it only on members: "
            "if torch.distributed.get_rank(group) >= 0."
        )
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return Peers(call, group, ranks, rank, device, checks) if len(ranks) > 1 else None


def as_bytes(data: Tensor) -> bytearray:
    """Return the content of a tensor of bytes. Unlike ``data.numpy().tobytes()``, this works without numpy."""
    packed = bytearray(data.numel())
    torch.frombuffer(packed, dtype=torch.uint8).copy_(data.flatten())
    return packed


def _shown(text: str) -> str:
    return f"{text.partition('(')[2].partition(' ')[0]}()" if text.startswith(f"{COMPARISON}(") else text


# ---- objects ---------------------------------------------------------------------------------------------------------

# torch.save writes an object that contains tensors, and pickle writes any other object. Loading data of torch.save
# takes half a millisecond. This is too long if each of 1,024 ranks loads an object of every other rank.


class _HasTensorError(Exception):
    pass


def _refuse(obj: Any) -> Any:
    raise _HasTensorError


# Subclasses of Tensor need no entry, because pickling them reaches their storage.
_TENSORS = dict.fromkeys((Tensor, nn.Parameter, nn.Buffer, torch.UntypedStorage, torch.TypedStorage), _refuse)


def dumped(obj: Any) -> tuple[bytes, str | None]:
    """Return the bytes of ``obj``, and ``None``. If ``obj`` cannot be pickled, return ``b""`` and the reason."""
    buffer = io.BytesIO()
    try:
        try:
            pickler = pickle.Pickler(buffer, protocol=4)
            pickler.dispatch_table = {**copyreg.dispatch_table, **_TENSORS}
            pickler.dump(obj)
        except _HasTensorError:
            torch.save(obj, buffer := io.BytesIO())
    except Exception as error:  # a class's __reduce__ may raise any exception
        return b"", f"an object that cannot be pickled: {type(error).__name__}: {error}"
    return buffer.getvalue(), None


def loaded(data: bytes | bytearray, device: torch.device | None) -> Any:
    """Return the object that another rank of this job has passed to :func:`dumped`. Tensors on an accelerator are moved
    to this rank's device.
    """

    def here(storage: Any, location: str) -> Any:
        target = nearest(location.partition(":")[0], device)
        return storage if target.type in ("cpu", "meta") else storage.to(device=target)

    if data.startswith(b"\x80"):
        return pickle.loads(data)  # these bytes are from pickle: data of torch.save begins differently
    return torch.load(io.BytesIO(data), map_location=here, weights_only=False)


def nearest(kind: str, device: torch.device | None) -> torch.device:
    """Return ``device`` if its type is ``kind``. Otherwise return the default device of the type ``kind``."""
    return device if device is not None and device.type == kind else torch.device(kind)


# ---- words -----------------------------------------------------------------------------------------------------------


def by_rank(texts: Sequence[str], ranks: Sequence[int], separator: str = ": ") -> str:
    """Return a line with each different text and the ranks that have it, such as "ranks 0, 2: a; rank 1: b"."""
    return "; ".join(f"{_ranks(whose)}{separator}{text}" for text, whose in owners_of(texts, ranks).items())


def owners_of(texts: Sequence[str], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return, for each different text, the ranks that have the text."""
    owners: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        owners.setdefault(text, []).append(rank)
    return owners


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(ranks)}"


def some(values: Sequence[Any]) -> str:
    """Return a text such as "0, 1, 2, 3, 4, 5, 6, 7 and 5 more"."""
    return first_of(map(repr, values), _LONGEST_LIST)


def differing_names(each: list[list[str]], ranks: Sequence[int]) -> str:
    """Return an error message that shows the names that only some ranks have."""
    common = set(each[0]).intersection(*each[1:])
    own = [[name for name in names if name not in common] for names in each]
    if any(own):
        listed = by_rank([f"has {some(names)}" if names else "has none of them" for names in own], ranks, " ")
        what = f"have different names; of the names that some ranks lack, {listed}"
    else:
        what = f"have the same names in different order or number: {by_rank([some(names) for names in each], ranks)}"
    return (
        f"The ranks of the group {what}. Log the same names in the same order on every rank, outside of conditions "
        "that differ between ranks."
    )
