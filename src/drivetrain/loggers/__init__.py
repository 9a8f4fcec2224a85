"""Loggers: one file per destination."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
