"""Lightning's import paths for plugins; the classes are defined in their own folders."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
