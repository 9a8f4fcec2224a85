"""A profiler that measures the durations of actions."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from drivetrain.base.introspect import reads
from drivetrain.profilers.profiler import Profiler, already_running, not_running, table

_RECENT = 10_000


@dataclass
class Durations:
    """Statistics of the calls of one action, in constant memory.

    Attributes:
        calls: the number of finished calls.
        total: the total duration of these calls in seconds, including inner actions.
        own: the total duration in seconds, without inner actions.
        longest: the duration of the longest call, in seconds.
        recent: the durations of the last calls, at most 10 000.
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
    inner: float = 0.0  # the number of seconds in inner actions


class SimpleProfiler(Profiler):
    """Measures the duration and counts the calls of each action.

    The table has one row per action. The column ``Total`` includes the time of inner actions. The column ``Own``
    excludes this time, so the sum of the column is the time of the run. Each run starts a new table.

    The times are measured in this process. A GPU works asynchronously, so the GPU's time appears in the action that
    waits for the GPU; ``PyTorchProfiler`` shows both.

    ``durations`` has the statistics of each action, and ``recorded_durations`` has the durations of each action's last
    calls.

    Args:
        dirpath: the folder of the table's file; ``None``: the folder of the run's logger.
        filename: a part of the file's name. ``None``: the table is printed.
        extended: whether to show all columns. If False, the table has only the action, the mean duration and the total
            duration.
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
        """Start a new table."""
        super().setup(stage, local_rank, log_dir)
        self.durations, self._open, self._began = {}, [], time.perf_counter()

    def start(self, action_name: str) -> None:
        """Begin an action. If other actions are running, this action is an inner action of the latest one.

        Raises:
            ConfigurationError: the action is already running.
        """
        if any(each.action == action_name for each in self._open):
            raise already_running(self, action_name)
        self._open.append(_Open(action_name, time.perf_counter()))

    def stop(self, action_name: str) -> None:
        """End an action.

        Raises:
            ConfigurationError: the action is not running.
        """
        now = time.perf_counter()
        index = next((index for index, each in enumerate(self._open) if each.action == action_name), None)
        if index is None:
            raise not_running(self, action_name)
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
        """The durations of the last 10 000 calls of each action, in seconds; an empty list for an unknown name."""
        return defaultdict(list, {action: list(kept.recent) for action, kept in self.durations.items()})

    @property
    def current_actions(self) -> dict[str, float]:
        """The start time of each running action, by name."""
        return {each.action: each.began for each in self._open}

    start_time: float = reads("_began", "The start time of the table.")

    def summary(self) -> str:
        """Return the table. The actions with the longest total duration come first."""
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
