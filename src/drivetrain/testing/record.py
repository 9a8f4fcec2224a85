"""The record of a recording: moves, host syncs, optimizer steps, and bytes on each device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from drivetrain.testing._places import Place, Places, spelled


@dataclass(frozen=True)
class Event:
    """What all records have in common.

    Attributes:
        step: how many optimizer steps had been done.
        line: whose line asked for it, outside of torch and drivetrain: ``"train.py:14 in training_step"``.
        through: the line of drivetrain that passed it on, or "" where torch was called directly.
    """

    step: int
    line: str
    through: str


@dataclass(frozen=True)
class Move(Event):
    """A tensor was copied from one place to another.

    Attributes:
        source, target: a device's number, or ``None`` for the host.
        bytes: how many travelled.
        blocking: the program had to wait for it, unless it went from one device to another.
    """

    source: Place
    target: Place
    bytes: int
    blocking: bool


@dataclass(frozen=True)
class Sync(Event):
    """The host had to wait for a device: a value was read, or a copy asked for without ``non_blocking``.

    Attributes:
        what: the function that was called, such as "item".
        device: its number.
    """

    what: str
    device: int


@dataclass(frozen=True)
class Step(Event):
    """An optimizer has stepped.

    Attributes:
        optimizer: the name of its class.
        devices: where its parameters are, ``None`` for the host.
    """

    optimizer: str
    devices: tuple[Place, ...]


@dataclass
class Record:
    """What happened on the pretend devices, in order. ``print(record)`` is a summary of it.

    Attributes:
        moves, syncs, steps: one entry for each, oldest first.
    """

    moves: list[Move] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _places: Places = field(default_factory=lambda: Places(1), repr=False)

    def bytes_alive(self, device: int | torch.device = 0) -> int:
        """Return bytes of all tensors that are on ``device`` now; memory that an operation needs inside is not seen."""
        return self._places.alive[self._places.check(device)]

    def peak_bytes(self, device: int | torch.device = 0) -> int:
        """Return the most that :meth:`bytes_alive` has been since the recording began, or since :meth:`reset_peak`."""
        return self._places.peak[self._places.check(device)]

    def reset_peak(self, device: int | torch.device = 0) -> None:
        """Reset the peak that :meth:`peak_bytes` returns."""
        index = self._places.check(device)
        self._places.peak[index] = self._places.alive[index]

    def clear(self) -> None:
        """Forget the moves, syncs and steps so far."""
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
