"""Where and how checkpoints are stored."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
