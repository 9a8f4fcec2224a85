"""Stores and file formats of checkpoints."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
