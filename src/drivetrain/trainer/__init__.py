"""The Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer as Trainer

_PUBLIC = {"Trainer": "trainer"}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
