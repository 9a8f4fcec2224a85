"""A profiler that measures the time of Python functions with cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from typing import Any

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.errors import ConfigurationError, is_number, wrong_value
from drivetrain.profilers.profiler import Profiler, already_running, not_running

_PRINTED = 20  # the number of functions to print for each action, if the user sets no limit

Path = tuple[str, ...]  # the names of nested actions, the outermost first


class AdvancedProfiler(Profiler):
    """Records every call of a Python function, and the action in which it was called.

    The report has a section for each action, with the slowest functions first. If actions are nested, a call counts for
    the innermost action and for all outer actions. Recording makes Python functions several times slower.

    Args:
        dirpath: the folder of the files; ``None``: the folder of the run's logger.
        filename: a part of the files' names. ``None``: the report is printed.
        line_count_restriction: the number of functions per action in the report; a float below 1.0 is a fraction of the
            functions. With 1.0, a file has all functions, and a printed report has 20.
        dump_stats: also write a file for each action, ``<stage>-<filename>-<rank>-<action>.prof``, for ``pstats`` and
            tools such as snakeviz.

    Raises:
        ConfigurationError: ``line_count_restriction`` is not a positive number.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        if not is_number(line_count_restriction) or line_count_restriction <= 0:
            expected = "a number of functions, or a fraction of them such as 0.5"
            raise wrong_value("AdvancedProfiler", "line_count_restriction", line_count_restriction, expected, "20")
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._profiles: dict[Path, cProfile.Profile] = {}
        self._open: Path = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_profiles": {}, "_open": ()}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a new report."""
        self._pause()
        super().setup(stage, local_rank, log_dir)
        self._profiles, self._open = {}, ()

    def start(self, action_name: str) -> None:
        """Begin an action.

        Raises:
            ConfigurationError: the action is already running, or another tool profiles this process.
        """
        if action_name in self._open:
            raise already_running(self, action_name)
        self._pause()
        self._record((*self._open, action_name))

    def stop(self, action_name: str) -> None:
        """End an action.

        Raises:
            ConfigurationError: the action is not running.
        """
        self._pause()
        if action_name not in self._open:
            raise not_running(self, action_name)
        self._record(tuple(each for each in self._open if each != action_name))

    def _pause(self) -> None:
        if self._open:
            self._profiles[self._open].disable()

    def _record(self, path: Path) -> None:
        """Record calls for the nested actions ``path`` from now on. The previous profile must be paused, because Python
        allows only one profile at a time.
        """
        self._open = path
        if path:
            profile = self._profiles.setdefault(path, cProfile.Profile())
            try:
                profile.enable()
            except ValueError as error:
                self._open = ()
                raise ConfigurationError(
                    f"AdvancedProfiler cannot record: {error}. Leave out the other profiler or debugger, or use "
                    "SimpleProfiler."
                ) from error

    def _stats(self) -> dict[str, pstats.Stats]:
        """Return the statistics of each action, including inner actions."""
        open_ = self._open
        stats: dict[str, pstats.Stats] = {}
        self._pause()
        for path, profile in self._profiles.items():
            profile.create_stats()
            if not profile.stats:  # nothing was called
                continue
            for action in path:
                if action in stats:
                    stats[action].add(profile)
                else:
                    stats[action] = pstats.Stats(profile)
        self._record(open_)
        return stats

    def summary(self) -> str:
        """Return the report, with a section for each action."""
        limit = self.line_count_restriction
        if isinstance(limit, float) and limit >= 1:
            limit = int(limit) if limit > 1 else _PRINTED if self.filename is None else 1.0
        parts = []
        for action, stats in self._stats().items():
            text = io.StringIO()
            vars(stats)["stream"] = text
            stats.strip_dirs().sort_stats("cumulative").print_stats(limit)
            parts.append(f"Profile of {action}\n{text.getvalue().strip()}")
        return "\n\n".join(parts)

    def describe(self) -> None:
        """Print or write the report. With ``dump_stats``, also write the statistics."""
        super().describe()
        if not self.dump_stats:
            return
        for action, stats in self._stats().items():
            stats.dump_stats(path := self._path(".prof", action))
        if self._profiles:
            rank_zero_info(f"AdvancedProfiler wrote the statistics of each action to {os.path.dirname(path)}.")

    def teardown(self, stage: str | None) -> None:
        """Stop a recording that is still running after an exception."""
        self._pause()
        self._open = ()
