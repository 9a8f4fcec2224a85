"""Numeric precisions: one file for each, such as mixed precision or 8-bit floats."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
