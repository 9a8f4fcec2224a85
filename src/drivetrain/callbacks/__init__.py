"""Ready-made callbacks, one file for each."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
