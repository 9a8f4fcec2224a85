"""Accelerators: one file per kind of hardware."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
