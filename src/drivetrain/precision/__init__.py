"""How numbers are kept: one file per scheme."""

from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision

__all__ = ["MixedPrecision", "Precision"]
