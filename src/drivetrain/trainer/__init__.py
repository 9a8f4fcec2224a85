"""The Trainer."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.trainer.trainer import Trainer as Trainer
