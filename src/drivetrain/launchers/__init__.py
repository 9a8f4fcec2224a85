"""Launchers, which start the processes of a job: one file per launcher."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
