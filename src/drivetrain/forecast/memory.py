"""Compute the peak of memory from recorded events, with the kinds of memory and the program's line. Extrapolate from
two and three blocks to all blocks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.forecast.allocator import reserved
from drivetrain.forecast.operations import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    Event,
    Ledger,
    Recorded,
)
from drivetrain.forecast.repeated import repeated

Key = tuple[int, str, str]
"""Identifies a stretch (a part of a window) by the micro-batch, the phase, and the place before, in or after the
blocks.
"""


@dataclass
class Stretch:
    """The largest memory in a stretch, which is a part of a window (the batches of one optimizer step).

    Attributes:
        total: the bytes on the device.
        kinds: the bytes by kind, such as "activations".
        blocks: the bytes of activations by block. "" is outside of blocks.
        phase, block, line: the place in the program with the largest memory.
    """

    total: int
    kinds: dict[str, int]
    blocks: dict[str, int]
    phase: str
    block: str
    line: str


@dataclass
class Measured:
    """The memory, the operations and the exchanges of one rank in a window (the batches of one optimizer step).

    Attributes:
        stretches: the memory of each part of the window, in order.
        recorded: the operations and exchanges of the window.
        blocks: the paths of the repeated blocks.
        lists: the paths of the lists whose blocks were removed, and the lengths before the removal.
        batches: the number of micro-batches in a window. At most two micro-batches are measured.
        on_host: the kinds of memory that the strategy keeps on the host. The totals of the stretches do not include
            these kinds.
        unreadable: for each line of the program, how many unknown values the line reads.
        read: for each line of the program, how many recorded values the line reads. A run with real values has recorded
            these values.
        start: for each kind of memory, the bytes at the beginning of the window.
        batch_size: the number of samples in a micro-batch, or 0 if it is unknown.
        live: for each hook, the live bytes that were measured when the hook was last called.
        classes: the ranks of the job, grouped by the sizes of their shards; the group with the largest shards first.
        fragments: the bytes that torch's allocator reserves in addition to the peak.
    """

    stretches: dict[Key, Stretch]
    recorded: Recorded
    blocks: tuple[str, ...]
    lists: tuple[tuple[str, int], ...]
    batches: int
    on_host: tuple[str, ...] = ()
    unreadable: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    batch_size: int = 0
    live: dict[str, int] = field(default_factory=dict)
    classes: tuple[tuple[int, ...], ...] = ()
    fragments: int = 0

    @property
    def peak(self) -> Stretch:
        """The stretch with the most memory."""
        return max(self.stretches.values(), key=lambda each: each.total)


@dataclass
class Change:
    """A change of the program that may reduce the memory.

    Attributes:
        name: a short name.
        write: the line that the user must write.
        arguments: the Trainer's arguments that the change sets.
        case: attributes of a :class:`~drivetrain.forecast.windows.Case`.
        rank: the rank to measure, by default the planned rank.
        found: the measurement of the changed program, or ``None`` if the measurement failed. The attribute ``failed``
            contains the reason.
    """

    name: str
    write: str
    arguments: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    found: Measured | None = None
    failed: str = ""

    def beside(self, other: Change) -> Change:
        """Return a change that combines this change and ``other``."""
        return Change(
            f"{self.name} + {other.name}", f"{self.write} and {other.write}", {**self.arguments, **other.arguments},
            {**self.case, **other.case},
        )  # fmt: skip


def measured(
    ledger: Ledger, first: int, blocks: tuple[str, ...], on_host: tuple[str, ...], **others: Any
) -> Measured:  # fmt: skip
    """Return the memory of the window that begins with event number ``first``. ``others`` are further attributes of the
    result.
    """
    kinds, activations = Counter[str](), Counter[str]()
    total = 0
    places = _Places(blocks)
    stretches: dict[Key, Stretch] = {}
    start: dict[str, int] = {}
    for at, event in enumerate(ledger.events):
        kind = ledger.kinds[event.storage]
        kinds[kind] += event.size
        if kind == ACTIVATIONS:
            activations[ledger.blocks[event.storage]] += event.size
        if kind not in on_host:
            total += event.size
        if at + 1 < first:
            continue
        if at + 1 == first:
            start = {name: kinds[name] for name in KINDS}
            continue
        key = places.key(event)
        held = stretches.get(key)
        if held is None or total > held.total:
            stretches[key] = Stretch(
                total, dict(kinds), {name: size for name, size in activations.items() if size}, event.phase,
                event.block, event.line,
            )  # fmt: skip
    peak = max(each.total for each in stretches.values())
    return Measured(
        stretches, blocks=blocks, on_host=on_host, unreadable=dict(ledger.unreadable), read=dict(ledger.read),
        start=start, fragments=max(0, _reserved(ledger, on_host) - peak), **others,
    )  # fmt: skip


def _reserved(ledger: Ledger, on_host: tuple[str, ...]) -> int:
    """Return the bytes that torch's allocator reserves in all windows.

    FSDP2 allocates gathered parameters, and reduced gradients, on two further streams.
    """

    def stream_of(storage: int) -> str:
        maker = ledger.makers[storage]
        return maker if maker == "foreach_all_gather" or ledger.kinds[storage] == GRADIENTS else ""

    events = [each for each in ledger.events if ledger.kinds[each.storage] not in on_host]
    before = sum(ledger.kinds[each.storage] not in on_host for each in ledger.events[: ledger.set_up])
    return reserved(events, stream_of, before)


class _Places:
    """Names the place of an event: in the first, a middle or the last block, before all blocks, or after a block."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        parents: dict[str, list[str]] = {}
        for path in blocks:
            parents.setdefault(path.rpartition(".")[0], []).append(path)
        self._roles = {
            path: f"{parent}:{'first' if path == paths[0] else 'last' if path == paths[-1] else 'middle'}"
            for parent, paths in parents.items()
            for path in paths
        }
        self._batch = 0
        self._phase, self._seen = "", ""

    def key(self, event: Event) -> Key:
        phase = "backward" if event.phase == "recompute" else event.phase
        if phase != self._phase:
            self._batch += phase == "forward"
            self._phase, self._seen = phase, ""
        if event.block in self._roles:
            self._seen = self._roles[event.block]
            return self._batch, phase, self._seen
        return self._batch, phase, f"outside, after {self._seen}" if self._seen else "outside"


# ---- from few blocks to all ------------------------------------------------------------------------------------------


def multiplied(few: Measured, more: Iterable[Measured], fewest: int) -> Measured:
    """Return the measurement extrapolated to the model with all blocks.

    In each part of the window, memory is a linear function of the number of blocks. A block adds its shards, and the
    activations and gradients of the block that are live in this part. The allocator's fragments are assumed not to
    grow, because they come from tensors that are larger than a block's tensors.

    Args:
        few: the result with ``fewest`` blocks in each list.
        more: for each list, the result with one more block in this list.
        fewest: the number of blocks in ``few``.
    """
    each = list(zip(more, few.lists, strict=True))
    stretches = {}
    for key, base in few.stretches.items():
        grown = [(other.stretches[key], length - fewest) for other, (_, length) in each if key in other.stretches]
        if len(grown) < len(each):
            # this part of the window exists only in ``few``
            continue
        kinds = _line(base.kinds, [(other.kinds, factor) for other, factor in grown])
        block = _line(_by_role(base.blocks), [(_by_role(other.blocks), factor) for other, factor in grown])
        total = base.total + sum((other.total - base.total) * factor for other, factor in grown)
        stretches[key] = dataclasses.replace(base, total=total, kinds=kinds, blocks=block)
    start = _line(few.start, [(other.start, length - fewest) for other, (_, length) in each])
    steps = few.recorded.steps
    for other, (_, length) in each:
        steps = repeated(few.recorded.steps, other.recorded.steps, length) if len(each) == 1 else steps
    recorded = dataclasses.replace(few.recorded, steps=steps)
    return dataclasses.replace(few, stretches=stretches, recorded=recorded, start=start)


def _line(base: Mapping[str, int], grown: list[tuple[Mapping[str, int], int]]) -> dict[str, int]:
    names = dict.fromkeys(name for values in (base, *(other for other, _ in grown)) for name in values)
    return {
        name: base.get(name, 0) + sum((other.get(name, 0) - base.get(name, 0)) * factor for other, factor in grown)
        for name in names
    }


def _by_role(blocks: Mapping[str, int]) -> dict[str, int]:
    """For each list of blocks, return the sum of the blocks' activations. The key is the list's path and ".*"."""
    found = Counter[str]()
    for path, size in blocks.items():
        parent, dot, _ = path.rpartition(".")
        found[f"{parent}.*" if dot else path] += size
    return found
