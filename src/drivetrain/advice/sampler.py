"""Measure how a fit spends its wall time, with a thread that reads the fit's phase at intervals.

[Note: how the time is measured]
The loops always write the current phase, and the measuring thread reads it at intervals. Each phase belongs to a part
of the fit, such as "forward". The thread adds the time since its previous reading to this part. The parts therefore add
up to the wall time. In some phases, the thread also reads the stack of the training thread, to find the innermost line
of user code. The thread reads no source files while the fit runs, because a fork during such a read could hang.
"""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from drivetrain.accelerators.accelerator import HOST
from drivetrain.advice.time_spent import PARTS, TimeSpent
from drivetrain.advice.verdict import Line, Measured, RankTimes, judge
from drivetrain.base.torch_private import GET_ITERATOR
from drivetrain.data.kept import parts_of
from drivetrain.launchers import board
from drivetrain.launchers.tracebacks import is_library
from drivetrain.loops.progress import Phase

if TYPE_CHECKING:
    from drivetrain.loops.run import Run

_PART_OF: dict[int, str] = {
    Phase.EPOCH_START: "hooks", Phase.FETCH: "fetch", Phase.BATCH_START: "hooks", Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward", Phase.OPTIMIZER_STEP: "optimizer", Phase.BATCH_END: "hooks", Phase.LOG_FLUSH: "log",
    Phase.VALIDATION_DUE: "validation", Phase.VALIDATED: "hooks", Phase.EPOCH_END: "hooks",
    Phase.BETWEEN_EPOCHS: "hooks", Phase.TRAIN_END: "hooks", Phase.VALIDATION_START: "validation",
    Phase.VALIDATION_FETCH: "validation", Phase.VALIDATION_BATCH: "validation", Phase.VALIDATION_END: "validation",
}  # fmt: skip
"""For each phase, the part of a fit's time to which the phase belongs. Other phases belong to the part "start"."""

_SEEN_IN_STACK = frozenset({Phase.FETCH, Phase.BATCH_START, Phase.FORWARD, Phase.EPOCH_END})
"""The phases in which the thread also reads the stack, because several kinds of code run in these phases."""

_OWN_PLACES = {
    ("tree.py", "move"): "move", ("hooks.py", "by_hooks"): "move", ("step.py", "manual_backward"): "backward",
    ("own_step.py", "backward"): "backward", ("own_step.py", "optimizer_step"): "optimizer",
    ("run.py", "publish"): "log",
}  # fmt: skip
"""Functions of drivetrain, as (file, name), and the part to which their time belongs instead of the phase's part. The
thread sees these functions only in the phases of ``_SEEN_IN_STACK``.
"""

_USERS, _FETCHER, _LOOP = "a user's", "torch's data loading", "the loop, where the stack of a batch ends"

# the seconds between two readings of the phase: 1/20 of the fit's age, but within these limits
_EVERY_S, _LOOKS_PER_AGE = (0.1, 0.5), 20
_MOST_POINTS = 64  # the largest number of points in a memory curve

# a rank writes its seconds of "fetch" and "forward", in microseconds, at these indices of its shared memory on the
# board
_FETCH_S, _FORWARD_S = board.ENGINE + 1, board.ENGINE + 2


class _Place(NamedTuple):
    """What the training thread did: the part of the fit, a line of user code, and a line of torch's data loading."""

    part: str
    file: str = ""
    line: int = 0
    name: str = ""
    fetcher: tuple[str, int] = ("", 0)


class Sampler(threading.Thread):
    """Measures one fit, from the creation of this object until :meth:`stop`.

    Args:
        run: the run of the fit. The training thread must create this object, and call :meth:`stop`.
        began_s: when the fit began, by ``time.monotonic``.
        resumes: whether the fit resumes from a checkpoint.
    """

    def __init__(self, run: Run, began_s: float, resumes: bool) -> None:
        super().__init__(name="drivetrain time", daemon=True)
        self._run, self._progress = run, run.progress
        self._began_s, self._last_s, self._trains = began_s, time.monotonic(), False
        self._before = "restart" if resumes else "start"
        self._seconds, self._looks = {**dict.fromkeys(PARTS, 0.0), self._before: self._last_s - began_s}, 0
        self._places: defaultdict[_Place, float] = defaultdict(float)
        self._kinds: dict[tuple[str, str], str] = {}  # (file, function) -> the result of _kind()
        self._training_thread = threading.get_ident()
        self._core_file, self._core_from_s = f"/proc/self/task/{threading.get_native_id()}/schedstat", 0.0
        self._memory: dict[str, list[float]] = {"host": [], "device": []}
        self._busy: list[float] = []
        self._period_s, self._due_s = 0.1, 0.0
        device = run.engine.strategy.root_device
        self._device = None if device == HOST else device  # None if the model is on the CPU
        self._earlier_batches = self._progress.total_batches
        self._sheet = board.own_sheet()
        self._over, self._lock = threading.Event(), threading.Lock()

    def run(self) -> None:
        """Read the phase at intervals, until :meth:`stop`."""
        looks, (shortest_s, longest_s) = 0, _EVERY_S
        while True:
            age_s, looks = self._last_s - self._began_s, looks + 1
            wait_s = min(max(age_s / _LOOKS_PER_AGE, shortest_s), longest_s)
            # vary the intervals, so that the thread does not always read the phase at the same place of a step
            if self._over.wait(wait_s * (0.5 + looks * 0.618 % 1)):
                return
            with self._lock:
                self._look()
                if self._trains and self._last_s >= self._due_s:
                    self._read_device(self._last_s)

    def _look(self) -> None:
        slot, now_s = self._progress.slot, time.monotonic()
        phase, since_s, self._last_s = slot[0], now_s - self._last_s, now_s
        in_step = Phase.BATCH_START <= phase <= Phase.OPTIMIZER_STEP
        if not self._trains and (in_step or (phase >= Phase.FETCH and self._batches() > 0)):
            self._trains, self._core_from_s = True, _core_wait_s(self._core_file)
        part = "checkpoint" if slot[3] else _PART_OF.get(phase, "start")
        if self._trains:
            self._looks += 1
            if phase in _SEEN_IN_STACK and not slot[3]:
                place = self._place(part)
                self._places[place] += since_s
                part = place.part
        elif part not in ("checkpoint", "validation"):
            part = self._before
        self._seconds[part] += since_s
        if self._sheet is not None:
            words = self._sheet.words
            words[_FETCH_S], words[_FORWARD_S] = (int(1e6 * self._seconds[each]) for each in ("fetch", "forward"))

    def _batches(self) -> int:
        """Return the number of batches that this fit has trained on."""
        progress = self._progress
        return progress.total_batches - max(self._earlier_batches, progress.resumed_batches)

    def _place(self, part: str) -> _Place:
        users: tuple[str, int, str] = ("", 0, "")
        for file, line, name in frames_of(self._training_thread):
            kind = self._kinds.get((file, name))
            if kind is None:
                kind = self._kinds[file, name] = _kind(file, name)
            if kind == _LOOP:
                break
            if kind == _USERS:
                users = users if users[0] else (file, line, name)
            elif kind == _FETCHER:
                return _Place(part, *users, (file, line))
            elif kind:
                part = kind
        return _Place(part, *users)

    def _read_device(self, now_s: float) -> None:
        """Read the memory in use and the device's utilization, at most ``_MOST_POINTS`` times."""
        stats: Mapping[str, float] = {}
        if self._device is not None:
            with suppress(Exception):  # a device may have no statistics
                stats = self._run.engine.accelerator.get_device_stats(self._device)
        if "utilization_percent" in stats:
            self._busy.append(stats["utilization_percent"] / 100)
        for name, value in (("host", _host_memory()), ("device", stats.get("allocated_bytes.all.current"))):
            if value is not None:
                self._memory[name].append(value)
        if max(map(len, self._memory.values())) >= _MOST_POINTS:
            for curve in self._memory.values():
                del curve[1::2]
            self._period_s *= 2
        self._due_s = now_s + self._period_s

    def time_spent(self, final: bool = False) -> TimeSpent:
        """Return how the time was spent so far; if ``final``, the result also has the verdict (the cause of a slow
        fit).
        """
        with self._lock:
            if not self._over.is_set():
                self._look()
            seconds, wall_s = dict(self._seconds), self._last_s - self._began_s
        return TimeSpent(seconds, wall_s, judge(self._measured(wall_s)) if final else None)

    def stop(self) -> TimeSpent:
        """End the measurement and return its result."""
        with self._lock:
            self._look()
            self._over.set()
        self.join()
        return self.time_spent(final=True)

    def _measured(self, wall_s: float) -> Measured:
        run, collate_s, workers_s, lines = self._run, 0.0, 0.0, dict[tuple[str, _Place], float]()
        for place, seconds in self._places.items():
            what, source = place.part, linecache.getline(*place.fetcher)
            if what == "fetch" and "collate_fn" in source:
                what, collate_s = "collate", collate_s + seconds
            if what == "fetch" and "MultiProcessing" in source:
                workers_s += seconds
            line = what, place._replace(fetcher=("", 0))
            lines[line] = lines.get(line, 0.0) + seconds
        loaders = parts_of(run.loaders.training()) if self._trains else ()
        return Measured(
            seconds=self._seconds,
            wall_s=wall_s,
            batches=self._batches(),
            looks=self._looks,
            collate_s=collate_s,
            workers_s=workers_s,
            lines=[_line(what, place, seconds) for (what, place), seconds in lines.items() if place.line],
            num_workers=max((getattr(each, "num_workers", 0) for each in loaders), default=0),
            log_every=run.limits.log_every_n_steps,
            core_s=_core_wait_s(self._core_file) - self._core_from_s,
            threads=torch.get_num_threads(),
            on_host=self._device is None,
            busy=sum(self._busy) / len(self._busy) if self._busy else None,
            memory=self._memory,
            ranks=self._ranks(),
        )

    def _ranks(self) -> Sequence[RankTimes]:
        """On rank 0, return the times that all ranks of this machine have written to their shared memory; on other
        ranks, ().
        """
        if self._sheet is None or self._run.engine.strategy.global_rank:
            return ()
        with suppress(OSError, ValueError):  # the board may have been removed
            shared = board.Board.found(self._sheet.folder)
            words = [shared.words(each) for each in range(len(shared.ranks))]
            return [
                RankTimes(rank, each[_FETCH_S] / 1e6, each[_FORWARD_S] / 1e6)
                for rank, each in zip(shared.ranks, words, strict=True)
            ]
        return ()


def _kind(path: str, name: str) -> str:
    file = os.path.basename(path)
    if not is_library(path):
        return _USERS
    if (file, name) == ("epoch.py", "run_batches"):
        return _LOOP
    fetches = (file, name) in {("fetch.py", "fetch"), ("dataloader.py", GET_ITERATOR)}
    return _FETCHER if fetches else _OWN_PLACES.get((file, name), "")


def _line(what: str, place: _Place, seconds: float) -> Line:
    source = linecache.getline(place.file, place.line).strip()
    return Line(what, f"{os.path.basename(place.file)}:{place.line} in {place.name}", source, seconds)


def _core_wait_s(file: str) -> float:
    """Return for how many seconds a thread was ready to run, but waited for a CPU core; 0 if this is unknown."""
    try:
        return int(Path(file).read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _host_memory() -> float | None:
    """Return the number of bytes of memory that only this process uses; ``None`` if the number is unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return float((int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError):
        return None


# ---- the stack of another thread ------------------------------------------------------------------------------------


def frames_of(thread: int) -> list[tuple[str, int, str]]:
    """Return the file, line and function of each frame on the stack of another thread, innermost first.

    faulthandler cannot replace this function, because faulthandler reads the frames of all threads. If torch has just
    started a thread whose Python state is incomplete, faulthandler ends the process with SIGSEGV.

    Args:
        thread: the other thread's :func:`threading.get_ident`.

    Returns:
        The frames; [] if Python has no GIL.
    """
    found: list[tuple[str, int, str]] = []
    if _WITHOUT_GIL:  # the other thread would change its frames
        return found
    with _no_garbage_collection() if sys.version_info[:2] == (3, 11) else nullcontext():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    return found


_WITHOUT_GIL = not getattr(sys, "_is_gil_enabled", lambda: True)()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context in which Python collects no garbage.

    When code reads a frame of another thread, Python 3.11 creates a frame object. Creating an object can start a
    garbage collection, and a finalizer can let the other thread run. If the other thread then returns from the frame,
    the process crashes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
