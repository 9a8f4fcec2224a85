"""Simulated devices, comparison of the Trainer with a plain loop, and test suites for accelerators and strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.testing.equivalence import check_against_plain_loop
    from drivetrain.testing.fake import FakeAccelerator, fake_devices
    from drivetrain.testing.groups import check_group
    from drivetrain.testing.programs import Program, random_program
    from drivetrain.testing.record import Move, Record, Step, Sync

_MODULES = {
    "FakeAccelerator": "fake", "Move": "record", "Program": "programs", "Record": "record", "Step": "record",
    "Sync": "record", "check_against_plain_loop": "equivalence", "check_group": "groups", "fake_devices": "fake",
    "random_program": "programs",
}  # fmt: skip
__all__ = [
    "FakeAccelerator", "Move", "Program", "Record", "Step", "Sync", "check_against_plain_loop", "check_group",
    "fake_devices", "random_program",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _MODULES)
