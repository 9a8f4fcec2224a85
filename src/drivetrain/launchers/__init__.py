"""How the processes of a job are started: one file per launcher."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
