"""Test programs for accelerators without having one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.testing.fake import FakeAccelerator, fake_devices
    from drivetrain.testing.record import Move, Record, Step, Sync

_MODULES = {
    "FakeAccelerator": "fake", "Move": "record", "Record": "record", "Step": "record", "Sync": "record",
    "fake_devices": "fake",
}  # fmt: skip
__all__ = ["FakeAccelerator", "Move", "Record", "Step", "Sync", "fake_devices"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    from drivetrain.errors import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
