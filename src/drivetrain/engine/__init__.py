"""The Engine, which runs models on devices, in a precision and with a strategy, for the Trainer and for your own
loops.
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)
