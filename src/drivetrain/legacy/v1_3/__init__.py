"""The API of Lightning 1.3, in which an accelerator consists of two plugins, on drivetrain's Trainer."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
