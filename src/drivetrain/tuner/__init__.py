"""Find a learning rate or a batch size before a run."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.tuner.tuning import Tuner as Tuner
