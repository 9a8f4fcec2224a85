"""The API of the 1.1 generation: accelerators that run the complete job, on the present Trainer."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
