"""Profilers, which measure the time and the memory of a run."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
