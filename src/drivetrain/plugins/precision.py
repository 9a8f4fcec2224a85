"""``drivetrain.plugins.precision``: see :mod:`drivetrain.precision`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import precision
from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.precision import BitsandbytesPrecision as BitsandbytesPrecision
    from drivetrain.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from drivetrain.precision import DoublePrecision as DoublePrecision
    from drivetrain.precision import Float8Precision as Float8Precision
    from drivetrain.precision import FSDPPrecision as FSDPPrecision
    from drivetrain.precision import HalfPrecision as HalfPrecision
    from drivetrain.precision import MixedPrecision as MixedPrecision
    from drivetrain.precision import Precision as Precision
    from drivetrain.precision import TransformerEnginePrecision as TransformerEnginePrecision
    from drivetrain.precision import XLAPrecision as XLAPrecision

_FILES = {name: "..precision" for name in precision.__all__ if name.endswith("Precision")}
__all__ = list(_FILES)

lazy(__name__, _FILES)
