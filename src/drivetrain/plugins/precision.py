"""``drivetrain.plugins.precision``: see :mod:`drivetrain.precision`."""

from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"]
