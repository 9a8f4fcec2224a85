"""The loops, as functions over one :class:`~drivetrain.loops.progress.Progress`."""

from drivetrain.base.lazy import lazy

lazy(__name__)
