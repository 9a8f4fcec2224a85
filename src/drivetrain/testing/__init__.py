"""Simulated devices, comparison of the Trainer with a plain loop, and test suites for accelerators and strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.testing.checks import check_part as check_part
    from drivetrain.testing.equivalence import check_against_plain_loop as check_against_plain_loop
    from drivetrain.testing.fake import FakeAccelerator as FakeAccelerator
    from drivetrain.testing.fake import fake_devices as fake_devices
    from drivetrain.testing.groups import check_group as check_group
    from drivetrain.testing.programs import Program as Program
    from drivetrain.testing.programs import random_program as random_program
    from drivetrain.testing.record import Move as Move
    from drivetrain.testing.record import Record as Record
    from drivetrain.testing.record import Step as Step
    from drivetrain.testing.record import Sync as Sync

_MODULES = {
    "FakeAccelerator": "fake", "Move": "record", "Program": "programs", "Record": "record", "Step": "record",
    "Sync": "record", "check_against_plain_loop": "equivalence", "check_group": "groups",
    "check_part": "checks", "fake_devices": "fake",
    "random_program": "programs",
}  # fmt: skip
__all__ = list(_MODULES)

lazy(__name__, _MODULES)
