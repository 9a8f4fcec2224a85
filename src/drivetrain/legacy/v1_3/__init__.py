"""The API of Lightning 1.3, based on drivetrain's Trainer. In this API, an accelerator consists of two plugins."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
