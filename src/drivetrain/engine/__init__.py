"""The Engine: runs models with a plan's precision, devices and strategy, for the Trainer and for your own loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.engine.engine import Engine as Engine

_PUBLIC = {"Engine": "engine"}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
