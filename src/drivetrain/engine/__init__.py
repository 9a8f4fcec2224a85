"""The Engine: runs models in a plan's precision, devices and strategy, for the Trainer and for loops of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.engine.engine import Engine as Engine

_PUBLIC = {"Engine": "engine"}
__all__ = list(_PUBLIC)

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _PUBLIC)
