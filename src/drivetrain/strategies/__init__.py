"""Strategies: how one model is trained on its devices."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
