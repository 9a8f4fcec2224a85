"""A profiler that measures nothing."""

from __future__ import annotations

from drivetrain.profilers.profiler import Profiler


class PassThroughProfiler(Profiler):
    """Measures nothing. If no profiler was passed, this is ``trainer.profiler``, so user code can always call it."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""
