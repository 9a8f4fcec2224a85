"""Loggers write metrics to files or services. Each file of this folder contains a logger for one format or service."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
