"""A profiler that measures nothing."""

from __future__ import annotations

from drivetrain.profilers.profiler import Profiler


class PassThroughProfiler(Profiler):
    """Measures nothing.

    Without a user's profiler, ``trainer.profiler`` is a PassThroughProfiler, so user code can always call it.
    """

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""
