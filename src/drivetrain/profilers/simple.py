"""How long each action took, as a table."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.profilers._table import table
from drivetrain.profilers.profiler import Profiler

_RECENT = 10_000


@dataclass
class Durations:
    """What is kept of the calls of one action; as much memory after a million calls as after one.

    Attributes:
        calls: how many have ended.
        total: their duration in seconds, with the actions inside them.
        own: without those.
        longest: the longest call's, in seconds.
        recent: those of the last calls, 10 000 at most.
    """

    calls: int = 0
    total: float = 0.0
    own: float = 0.0
    longest: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT), compare=False, repr=False)


@dataclass
class _Open:
    action: str
    began: float
    inner: float = 0.0  # seconds of the actions inside it


class SimpleProfiler(Profiler):
    """Measures how long actions take, and how often they happen.

    The table has one row per action. Actions contain others: ``Total`` counts them too, ``Own`` does not, so the
    ``Own`` column adds up to the time of the run. Each run begins a new table.

    Times are those of this process. A GPU works asynchronously, so that its time appears in the action that waits for
    it; ``PyTorchProfiler`` shows both.

    ``durations`` holds sums by action, ``recorded_durations`` the last calls one by one.

    Args:
        dirpath: folder of the table's file; ``None``: the folder of the run's logger.
        filename: what the file's name contains. With ``None`` the table is printed.
        extended: all columns. With False the table has the action, its mean duration and its total.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.durations: dict[str, Durations] = {}
        self._open: list[_Open] = []
        self._began = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a new table."""
        super().setup(stage, local_rank, log_dir)
        self.durations, self._open, self._began = {}, [], time.perf_counter()

    def start(self, action_name: str) -> None:
        """Begin an action; it is part of the innermost one that has begun.

        Raises:
            ConfigurationError: it has begun and not ended.
        """
        if any(each.action == action_name for each in self._open):
            raise ConfigurationError(
                f"SimpleProfiler.start({action_name!r}): this action has begun and not ended. Call "
                f"stop({action_name!r}) before, or give the inner one another name."
            )
        self._open.append(_Open(action_name, time.perf_counter()))

    def stop(self, action_name: str) -> None:
        """End an action.

        Raises:
            ConfigurationError: it has not begun.
        """
        now = time.perf_counter()
        index = next((index for index, each in enumerate(self._open) if each.action == action_name), None)
        if index is None:
            raise ConfigurationError(
                f"SimpleProfiler.stop({action_name!r}): this action has not begun. Call start({action_name!r}) before."
            )
        ended = self._open.pop(index)
        duration = now - ended.began
        if index > 0:
            self._open[index - 1].inner += duration
        kept = self.durations.setdefault(action_name, Durations())
        kept.calls += 1
        kept.total += duration
        kept.own += duration - ended.inner
        kept.longest = max(kept.longest, duration)
        kept.recent.append(duration)

    @property
    def recorded_durations(self) -> defaultdict[str, list[float]]:
        """By action, how long each of its last 10 000 calls took, in seconds; no times for any other name."""
        return defaultdict(list, {action: list(kept.recent) for action, kept in self.durations.items()})

    @property
    def current_actions(self) -> dict[str, float]:
        """The actions that have begun and not ended, with the clock's time of their begin."""
        return {each.action: each.began for each in self._open}

    @property
    def start_time(self) -> float:
        """The clock's time at which the table begins."""
        return self._began

    def summary(self) -> str:
        """Return the table, the actions that took longest first."""
        elapsed = time.perf_counter() - self._began
        durations = sorted(self.durations.items(), key=lambda item: -item[1].total)
        stage = f" of {self._stage}" if self._stage else ""
        title = f"Profile{stage}: {elapsed:.3f} s"
        if not self.extended:
            brief = [[name, f"{1e3 * each.total / each.calls:.3f}", f"{each.total:.3f}"] for name, each in durations]
            return table(title, ["Action", "Mean (ms)", "Total (s)"], brief)
        rows = [
            [
                name, str(each.calls), f"{1e3 * each.total / each.calls:.3f}", f"{1e3 * each.longest:.3f}",
                f"{each.total:.3f}", f"{each.own:.3f}", f"{100 * each.own / elapsed:.1f}",
            ]
            for name, each in durations
        ]  # fmt: skip
        other = max(0.0, elapsed - sum(each.own for _, each in durations))
        rows.append(["outside of all actions", "", "", "", "", f"{other:.3f}", f"{100 * other / elapsed:.1f}"])
        header = ["Action", "Calls", "Mean (ms)", "Longest (ms)", "Total (s)", "Own (s)", "Own (%)"]
        return table(title, header, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_open": []}
