"""The Engine runs models with a plan's precision, devices and strategy, for the Trainer and for your own loops."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
