"""``drivetrain.plugins.environments``: see :mod:`drivetrain.clusters`."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
