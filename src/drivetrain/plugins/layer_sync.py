"""``drivetrain.plugins.layer_sync``: see :mod:`drivetrain.strategies`."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
