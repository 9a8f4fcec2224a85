"""``drivetrain.plugins.precision``: see :mod:`drivetrain.precision`."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
