"""The API of the 1.3 generation: accelerators composed of two plugins, on the present Trainer."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
