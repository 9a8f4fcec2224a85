"""A profiler that measures the growth of memory in each action, and writes torch's snapshots of CUDA memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from drivetrain.accelerators.cuda import has_cuda, memory_in_use, record_allocations, write_allocations
from drivetrain.base.packages import psutil
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.errors import arguments_checked
from drivetrain.profilers.profiler import Profiler, table

_MIB = 2**20


@dataclass
class Growth:
    """Statistics of the calls of one action.

    Attributes:
        calls: the number of finished calls.
        grown: the total growth of memory in these calls, in bytes; negative if the calls freed more than they
            allocated.
        peak: the largest number of bytes in use during a call.
    """

    calls: int = 0
    grown: int = 0
    peak: int = 0


@dataclass
class _Open:
    action: str
    at_start: int
    peak: int


class MemoryProfiler(Profiler):
    """Measures the growth and the peak of memory in each action.

    With CUDA, the profiler measures torch's allocated memory on the current device. torch then also records each
    allocation with its line of code. The profiler writes a snapshot when the run ends or fails, for example out of
    memory: ``<stage>-<filename>-<rank>.pickle``, for https://pytorch.org/memory_viz. On other devices, the profiler
    measures the memory of this process, and writes no snapshot.

    The profiler resets torch's peak statistics, ``torch.cuda.max_memory_allocated()``, at the start and the end of each
    action.

    Args:
        dirpath: the folder of the files; ``None``: the folder of the run's logger.
        filename: a part of the files' names. ``None``: the table is printed.
        snapshot: whether to write the snapshot, which needs CUDA.
        max_entries: the maximum number of allocations and frees in the snapshot. The snapshot contains the latest
            allocations and frees.
    """

    @arguments_checked
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        snapshot: bool = True,
        max_entries: int = 100_000,
    ) -> None:
        super().__init__(dirpath, filename)
        self.growth: dict[str, Growth] = {}
        self.max_entries = max_entries
        self._snapshot = snapshot
        self._records = False
        self._open: list[_Open] = []
        self._process: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_open": [], "_process": None, "_records": False}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start a new table. With CUDA, also start a new record of allocations."""
        super().setup(stage, local_rank, log_dir)
        self.growth, self._open = {}, []
        if self._snapshot and has_cuda():
            record_allocations(self.max_entries)
            self._records = True

    def _used(self) -> tuple[int, int]:
        """Return the number of bytes in use, and the peak since the last call of this method."""
        if has_cuda():
            return memory_in_use()
        if self._process is None:
            self._process = psutil.Process()
        used: int = self._process.memory_info().rss
        return used, used

    def _now(self) -> int:
        used, peak = self._used()
        for each in self._open:
            each.peak = max(each.peak, peak)
        return used

    def start(self, action_name: str) -> None:
        """Begin an action."""
        used = self._now()
        self._open.append(_Open(action_name, used, used))

    def stop(self, action_name: str) -> None:
        """End an action. Do nothing if the action is not running."""
        used = self._now()
        index = next((index for index, each in enumerate(self._open) if each.action == action_name), None)
        if index is None:
            return
        ended, kept = self._open.pop(index), self.growth.setdefault(action_name, Growth())
        kept.calls += 1
        kept.grown += used - ended.at_start
        kept.peak = max(kept.peak, ended.peak)

    def summary(self) -> str:
        """Return the table. The actions with the highest peak come first."""
        of = "CUDA memory" if has_cuda() else "memory of the process"
        rows = [
            [name, str(each.calls), f"{each.peak / _MIB:.1f}", f"{each.grown / _MIB:+.1f}"]
            for name, each in sorted(self.growth.items(), key=lambda item: (-item[1].peak, -item[1].grown))
        ]
        stage = f" of {self._stage}" if self._stage else ""
        return table(f"Profile{stage}: {of}", ["Action", "Calls", "Highest (MiB)", "Grown (MiB)"], rows) if rows else ""

    def teardown(self, stage: str | None) -> None:
        """Write the snapshot, and let torch stop recording allocations."""
        if self._records:
            self._records = False
            path = self._path(".pickle", "memory")
            write_allocations(path)
            rank_zero_info(f"MemoryProfiler wrote {path}. Open it in https://pytorch.org/memory_viz.")
