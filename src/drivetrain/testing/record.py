"""The record of simulated devices: moves, host syncs, optimizer steps, and bytes on each device."""

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
        line: the line outside torch and drivetrain that caused the event: ``"train.py:14 in training_step"``.
        through: the line of drivetrain that called torch, or "" if the program called torch directly.
    """

    step: int
    line: str
    through: str


@dataclass(frozen=True)
class Move(Event):
    """A tensor was copied from one place to another.

    Attributes:
        source, target: a device's number, or ``None`` for the host.
        bytes: the number of bytes.
        blocking: whether the program had to wait for the copy; always false between two devices.
        pinned: whether the tensor was copied from pinned memory of the host. On real hardware, a copy from memory that
            is not pinned waits, even with ``non_blocking``, until the host has copied the tensor into pinned memory.
    """

    source: Place
    target: Place
    bytes: int
    blocking: bool
    pinned: bool = False


@dataclass(frozen=True)
class Sync(Event):
    """The host had to wait for a device: a value was read, or a copy was made without ``non_blocking``.

    Attributes:
        what: the called function, such as "item".
        device: its number.
    """

    what: str
    device: int


@dataclass(frozen=True)
class Step(Event):
    """An optimizer has stepped.

    Attributes:
        optimizer: the name of its class.
        devices: the devices of its parameters, ``None`` for the host.
    """

    optimizer: str
    devices: tuple[Place, ...]


@dataclass
class Record:
    """The events on the simulated devices, in order. ``print(record)`` prints a summary.

    Attributes:
        moves, syncs, steps: the events of each kind, oldest first.
    """

    moves: list[Move] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _places: Places = field(default_factory=lambda: Places(1), repr=False)

    def bytes_alive(self, device: int | torch.device = 0) -> int:
        """Return the bytes of all tensors on ``device`` now; temporary memory inside operations is not included."""
        return self._places.alive[self._places.check(device)]

    def peak_bytes(self, device: int | torch.device = 0) -> int:
        """Return the peak of :meth:`bytes_alive` since the recording began, or since :meth:`reset_peak`."""
        return self._places.peak[self._places.check(device)]

    def reset_peak(self, device: int | torch.device = 0) -> None:
        """Reset the peak that :meth:`peak_bytes` returns."""
        index = self._places.check(device)
        self._places.peak[index] = self._places.alive[index]

    def clear(self) -> None:
        """Remove the moves, syncs and steps so far."""
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
