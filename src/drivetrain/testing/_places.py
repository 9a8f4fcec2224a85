"""Track on which simulated device each tensor's storage is."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.base import torch_private
from drivetrain.base.torch_private import storage_key

Place = int | None
"""A simulated device's number, or ``None`` for the host."""

ANYWHERE = -1
"""The place of a tensor that torch has created without a device. The first operation that also has operands on a device
moves the tensor to this device.
"""


def spelled(place: Place) -> str:
    """Return a device's name for messages."""
    return "cpu" if place is None else f"fake:{place}"


def device_at(place: Place) -> torch.device:
    """Return the value of ``tensor.device`` for a tensor at this place."""
    return torch.device("cpu") if place is None else torch.device("cpu", place)


@dataclass
class _Held:
    place: int
    bytes: int
    storage: weakref.ref[Any]  # the weak reference has a callback for the end of the storage


class Places:
    """Knows on which of ``count`` simulated devices each storage is. A storage without an entry is on the host.

    A weak reference to a storage's Python object shows when the memory is freed. torch keeps this object as long as the
    storage exists, even if only an autograd graph uses the storage.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.alive = [0] * count
        self.peak = [0] * count
        self._held: dict[int, _Held] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}

    def check(self, device: int | torch.device) -> int:
        """Return the number of ``device``.

        Raises:
            RuntimeError: the device does not exist.
        """
        index = device if isinstance(device, int) else device.index
        if index is None or not 0 <= index < self.count:
            raise RuntimeError(
                f"invalid device ordinal: {device} is none of the {self.count} simulated devices, which are numbered "
                f"from 0. Write fake_devices({(index or 0) + 1}) or FakeAccelerator.recording(devices=...) around it."
            )
        return index

    def of(self, tensor: Tensor) -> Place:
        """Return the device of ``tensor``: its number, ``None`` for the host, or ``ANYWHERE``."""
        storage = storage_of(tensor)
        return None if storage is None else self.where(storage)

    def where(self, storage: Any) -> Place:
        """Return the device of a storage."""
        held = self._held.get(storage_key(storage))
        return None if held is None else held.place

    def put(self, storage: Any, place: int) -> None:
        """Record the size of ``storage``, and set its device to ``place`` if the storage has no device yet."""
        key, size = storage_key(storage), storage.nbytes()
        held = self._held.get(key)
        if held is None:
            self._held[key] = _Held(place, size, weakref.ref(storage, lambda _: self._forget(key)))
            self._count(place, size)
            return
        if held.place == ANYWHERE != place:
            held.place, held.bytes = place, size
            self._count(place, size)
        self.measure(storage)

    def pin(self, tensor: Tensor) -> Tensor:
        """Record that ``tensor`` is in pinned memory of the host, and return ``tensor``."""
        storage = storage_of(tensor)
        if storage is not None:
            key = storage_key(storage)
            self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in pinned memory of the host."""
        storage = storage_of(tensor)
        return storage is not None and storage_key(storage) in self._pinned

    def measure(self, storage: Any) -> None:
        """Record the current size of ``storage``, which an operation may have resized."""
        held, size = self._held.get(storage_key(storage)), storage.nbytes()
        if held is not None and held.bytes != size:
            self._count(held.place, size - held.bytes)
            held.bytes = size

    def _forget(self, key: int) -> None:
        held = self._held.pop(key)
        self._count(held.place, -held.bytes)

    def _count(self, place: int, size: int) -> None:
        if place != ANYWHERE:
            self.alive[place] += size
            self.peak[place] = max(self.peak[place], self.alive[place])


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of ``tensor``, or of the values if ``tensor`` is sparse. Return ``None`` if there is no
    storage.
    """
    if tensor.device.type != "cpu":
        return None
    try:
        if tensor.layout is torch.sparse_coo:
            tensor = torch_private.stored_values(tensor)
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper tensor of torch.func has no storage
        return None
