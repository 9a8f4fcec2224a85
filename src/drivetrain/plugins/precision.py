"""``drivetrain.plugins.precision``: see :mod:`drivetrain.precision`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.precision import DoublePrecision as DoublePrecision
    from drivetrain.precision import HalfPrecision as HalfPrecision
    from drivetrain.precision import MixedPrecision as MixedPrecision
    from drivetrain.precision import Precision as Precision

_FILES = {
    "DoublePrecision": "..precision",
    "HalfPrecision": "..precision",
    "MixedPrecision": "..precision",
    "Precision": "..precision",
}
__all__ = [
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _FILES)
