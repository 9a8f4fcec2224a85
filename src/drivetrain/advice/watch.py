"""The base class of observers that check a run and warn."""

from __future__ import annotations

from drivetrain.loops.run import Run


class Watch:
    """An observer of one run.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._done: set[str] = set()

    def first(self, what: str) -> bool:
        """Return whether this is the first call with ``what`` in this run."""
        is_first = what not in self._done
        self._done.add(what)
        return is_first
