"""Numeric precisions: one file per scheme."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
