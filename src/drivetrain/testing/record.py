"""What a simulation of devices records: moves, host syncs, optimizer steps, and the bytes on each device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from drivetrain.testing._places import Place, Places, spelled


@dataclass(frozen=True)
class Event:
    """The fields that all events have.

    Attributes:
        step: the number of earlier optimizer steps.
        line: the line outside torch and drivetrain that caused the event, such as ``"train.py:14 in training_step"``.
        through: the line of drivetrain that called torch, or "" if ``line`` called torch directly.
    """

    step: int
    line: str
    through: str


@dataclass(frozen=True)
class Move(Event):
    """A tensor was copied from one device to another device, or from or to the host.

    Attributes:
        source, target: the device's number, or ``None`` for the host.
        bytes: the number of bytes.
        blocking: False if the move was made with ``non_blocking``.
        pinned: whether the source was in pinned memory of the host. Real hardware also blocks with ``non_blocking`` if
            the source is in other memory of the host, because the tensor is first copied to pinned memory.
    """

    source: Place
    target: Place
    bytes: int
    blocking: bool
    pinned: bool = False


@dataclass(frozen=True)
class Sync(Event):
    """The host had to wait for a device, because the host read a value, or copied without ``non_blocking``.

    Attributes:
        what: the name of the called function, such as "item".
        device: the device's number.
    """

    what: str
    device: int


@dataclass(frozen=True)
class Step(Event):
    """An optimizer has made a step.

    Attributes:
        optimizer: the name of the optimizer's class.
        devices: the devices of the optimizer's parameters. ``None`` is the host.
    """

    optimizer: str
    devices: tuple[Place, ...]


@dataclass
class Record:
    """The events on the simulated devices. ``print(record)`` prints a summary.

    Attributes:
        moves, syncs, steps: the events of each kind, the oldest first.
    """

    moves: list[Move] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _places: Places = field(default_factory=lambda: Places(1), repr=False)

    def bytes_alive(self, device: int | torch.device = 0) -> int:
        """Return the bytes of all tensors that are on ``device`` now. Temporary memory inside operations is not
        included.
        """
        return self._places.alive[self._places.check(device)]

    def peak_bytes(self, device: int | torch.device = 0) -> int:
        """Return the peak of :meth:`bytes_alive` since the recording began, or since :meth:`reset_peak`."""
        return self._places.peak[self._places.check(device)]

    def reset_peak(self, device: int | torch.device = 0) -> None:
        """Reset the peak that :meth:`peak_bytes` returns."""
        index = self._places.check(device)
        self._places.peak[index] = self._places.alive[index]

    def clear(self) -> None:
        """Remove all recorded moves, syncs and steps."""
        self.moves.clear()
        self.syncs.clear()
        self.steps.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.steps)} optimizer steps, {len(self.moves)} moves, {len(self.syncs)} host syncs"]
        ways: dict[tuple[Place, Place], list[int]] = {}
        for move in self.moves:
            ways.setdefault((move.source, move.target), []).append(move.bytes)
        for (source, target), sizes in ways.items():
            lines.append(f"  {len(sizes)} moves {spelled(source)} -> {spelled(target)}, {sum(sizes)} bytes")
        for (what, line, through), count in Counter((s.what, s.line, s.through) for s in self.syncs).most_common():
            lines.append(f"  {count} syncs by {what} at {line}" + (f", through {through}" if through else ""))
        for index, (alive, peak) in enumerate(zip(self._places.alive, self._places.peak, strict=True)):
            lines.append(f"  {spelled(index)}: {alive} bytes alive, {peak} at most")
        return "\n".join(lines)
