"""Test programs for accelerators without having one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.testing.fake import FakeAccelerator, fake_devices
    from drivetrain.testing.record import Move, Record, Step, Sync

_MODULES = {
    "FakeAccelerator": "fake", "Move": "record", "Record": "record", "Step": "record", "Sync": "record",
    "fake_devices": "fake",
}  # fmt: skip
__all__ = ["FakeAccelerator", "Move", "Record", "Step", "Sync", "fake_devices"]

__getattr__, __dir__ = lazy(__name__, _MODULES)
