"""Loggers: one file for each format or service to which they write."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
