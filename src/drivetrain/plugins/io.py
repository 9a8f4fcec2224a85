"""``drivetrain.plugins.io``: see :mod:`drivetrain.checkpoints`."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
