"""Loaders and batches: combine loaders, divide samples among processes, fetch batches, resume inside a pass."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
