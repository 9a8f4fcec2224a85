"""Tools that find a learning rate or a batch size before a run."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
