"""Tools for tests: simulated devices, and checks for your own accelerators, strategies and other parts."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
