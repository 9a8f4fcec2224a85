"""The API of Lightning 1.1, based on drivetrain's Trainer. In this API, an accelerator runs the complete job."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
