"""Find a learning rate or a batch size before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.tuner.tuning import Tuner as Tuner

__all__ = ["Tuner"]

lazy(__name__, {"Tuner": "tuning"})
