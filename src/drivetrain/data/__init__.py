"""Loaders and batches: combining loaders, splitting them over processes, moving batches to the device."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
