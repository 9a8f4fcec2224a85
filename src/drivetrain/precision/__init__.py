"""How numbers are kept: one file per scheme."""

from drivetrain.precision.double import DoublePrecision
from drivetrain.precision.half import HalfPrecision
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"]
