"""Numeric precisions: one file per scheme."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.precision.bitsandbytes import BitsandbytesPrecision as BitsandbytesPrecision
    from drivetrain.precision.by_strategy import DeepSpeedPrecision as DeepSpeedPrecision
    from drivetrain.precision.by_strategy import FSDPPrecision as FSDPPrecision
    from drivetrain.precision.double import DoublePrecision as DoublePrecision
    from drivetrain.precision.float8 import Float8Precision as Float8Precision
    from drivetrain.precision.half import HalfPrecision as HalfPrecision
    from drivetrain.precision.mixed import MixedPrecision as MixedPrecision
    from drivetrain.precision.precision import Precision as Precision
    from drivetrain.precision.precision import PrecisionRegistry as PrecisionRegistry
    from drivetrain.precision.transformer_engine import TransformerEnginePrecision as TransformerEnginePrecision
    from drivetrain.precision.xla import XLAPrecision as XLAPrecision
