"""How numbers are kept: one file per scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.precision.double import DoublePrecision as DoublePrecision
    from drivetrain.precision.half import HalfPrecision as HalfPrecision
    from drivetrain.precision.mixed import MixedPrecision as MixedPrecision
    from drivetrain.precision.precision import Precision as Precision
    from drivetrain.precision.precision import PrecisionRegistry as PrecisionRegistry
_MODULES = {
    "DoublePrecision": "double",
    "HalfPrecision": "half",
    "MixedPrecision": "mixed",
    "Precision": "precision",
    "PrecisionRegistry": "precision",
}
__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "PrecisionRegistry"]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _MODULES)
