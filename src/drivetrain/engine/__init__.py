"""The Engine: runs models with a plan's precision, devices and strategy, for the Trainer and for your own loops."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.engine.engine import Engine as Engine
