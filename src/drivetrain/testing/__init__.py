"""Simulated devices, comparison of the Trainer with a plain loop, and test suites for accelerators and strategies."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
