"""The loops, as functions over one :class:`~drivetrain.loops.progress.Progress`."""
