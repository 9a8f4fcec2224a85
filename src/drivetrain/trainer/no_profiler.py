"""``trainer.profiler``, for callbacks and modules that profile parts of their work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class NoProfiler:
    """Measures nothing, where no profiler was passed. Its methods are those that user code calls of one."""

    def start(self, action_name: str) -> None:
        """Nothing."""

    def stop(self, action_name: str) -> None:
        """Nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def summary(self) -> str:
        """Return the empty report."""
        return ""

    def describe(self) -> None:
        """Nothing."""
