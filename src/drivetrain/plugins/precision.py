"""``drivetrain.plugins.precision``: see :mod:`drivetrain.precision`."""

from drivetrain.precision import MixedPrecision, Precision

__all__ = ["MixedPrecision", "Precision"]
