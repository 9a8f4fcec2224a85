"""The API of Lightning 1.1, in which accelerators run the complete job, on drivetrain's Trainer."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
