"""The ledger of a training: a file beside its checkpoints, to which each run appends records of how its time was spent.

A record is one line of JSON. One call of ``os.write`` appends it to the file. If the process is killed, at most the
last record is incomplete. Each record contains the run's total times so far, so a reader does not need the earlier
records. ``goodput.py`` reads the records.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.loops.goodput import PARTS, VERSION, Record, Report, account, read
from drivetrain.loops.progress import Phase

_STEP, _DATA, _VALIDATION, _SAVE, _START = range(len(PARTS))
_PART_OF = [_START] * (max(Phase) + 1)
"""For each phase, the index in ``PARTS`` of the part to which the phase's time is added."""
_PART_OF[Phase.EPOCH_START : Phase.BETWEEN_EPOCHS + 1] = [_STEP] * (Phase.BETWEEN_EPOCHS + 1 - Phase.EPOCH_START)
_PART_OF[Phase.FETCH] = _DATA
_PART_OF[Phase.VALIDATION_DUE] = _VALIDATION
_PART_OF[Phase.VALIDATION_START : Phase.VALIDATION_END + 1] = [_VALIDATION] * 4
_BEFORE_A_BATCH = [_START if part == _STEP else part for part in _PART_OF]
"""Replaces ``_PART_OF`` until a run's first batch begins. A run that resumes may enter the checkpoint's phase during
its set-up, for example BATCH_END. This table adds the time of such phases to "start".
"""
_BEFORE_A_BATCH[Phase.BATCH_START] = _STEP

_RECORDS_PER_AGE, _EVERY_S = 100, (1.0, 60.0)  # the time between records is 1 % of the run's age, 1 to 60 s


class TimedSlot:
    """Replaces the list :attr:`Progress.slot`, and measures how long a run spends in each part of ``PARTS``.

    The loops write the phase into the list or into this object by the same statement. A run without a ledger therefore
    takes no additional time.

    Args:
        memory: the list that this object replaces.
        earlier_s: the age of the run in seconds when this object is created.
        clock: a function that returns seconds.
    """

    def __init__(self, memory: Any, earlier_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        self._began = self._since = clock() - earlier_s
        self._seconds = [0.0] * len(PARTS)
        self._part, self._part_of = _START, _BEFORE_A_BATCH
        self.saved: Callable[[], None] = lambda: None  # called after each save

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, index: Any) -> Any:
        return self._memory[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        memory = self._memory
        memory[index] = value
        part = _SAVE if memory[3] else self._part_of[memory[0]]
        if part != self._part:
            self._enter(part)

    def _enter(self, part: int) -> None:
        now, before = self._clock(), self._part
        self._seconds[before] += now - self._since
        self._since, self._part = now, part
        if part == _STEP:
            self._part_of = _PART_OF
        if before == _SAVE:
            self.saved()

    def times(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the run began, in total and by part. Any thread can call this method."""
        part, seconds = self._part, list(self._seconds)
        elapsed_s = self._clock() - self._began
        seconds[part] += elapsed_s - sum(seconds)
        return elapsed_s, dict(zip(PARTS, seconds, strict=True))


class Ledger:
    """Appends records of one run to the ledger: at each event, and at intervals from a thread.

    If a write fails, the ledger warns once, and the run continues.

    Args:
        path: a local file; its folder is created.
        slot: measures the run's times.
        step: returns the number of optimizer steps.
    """

    def __init__(self, path: str, slot: TimedSlot, step: Callable[[], int]) -> None:
        self.path, self.slot, self._step = path, slot, step
        self._id, self._handle, self._failure, self._warned = uuid.uuid4().hex[:8], -1, "", False
        self._over = threading.Event()
        self._begin: Record = {}  # the record of the event "train"
        self._report = Report()  # the ledger's report up to the record "train"
        self._saves = 0
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._failure = files.reason(error, Path(path))
        self._begun = self.write("begin")
        slot.saved = self._note_save
        self._thread = threading.Thread(target=self._keep_writing, name="drivetrain ledger", daemon=True)
        self._thread.start()

    def begin_training(self, resumed: bool) -> None:
        """Append the record "train", which says that training begins at the current step. ``resumed``: whether the run
        resumes from a checkpoint.
        """
        self._begin = self.write("train", resumed=resumed)
        found, unread = list[Record](), 0
        with contextlib.suppress(OSError):
            found, unread = read(self.path)
        earlier = [each for each in found if each["run"] != self._id]
        # if a write failed, the file lacks this run's records
        self._report = account([*earlier, self._begun, self._begin], unread)

    def report(self) -> Report | None:
        """Return the ledger's report up to the present; ``None`` before training begins."""
        if not (begin := self._begin):
            return None
        elapsed_s, now = self.slot.times()
        since = {name: now[name] - begin["parts"][name] for name in PARTS}
        before = self._report
        return replace(
            before,
            seconds={name: value + since.get(name, 0.0) for name, value in before.seconds.items()},
            wall_s=before.wall_s + elapsed_s - begin["elapsed"],
            saves=before.saves + self._saves,
            save_s=before.save_s + since["save"],
        )

    def _note_save(self) -> None:
        self._saves += 1
        self.write("save")

    def write(self, event: str, warns: bool = True, **more: Any) -> Record:
        """Append and return a record of ``event`` with ``more`` entries. ``warns``: whether to warn, once in a run, if
        a write failed.
        """
        elapsed_s, seconds = self.slot.times()
        parts = {name: round(value, 6) for name, value in seconds.items()}
        record = {"v": VERSION, "run": self._id, "pid": os.getpid(), "event": event, "time": time.time()}
        record |= {"elapsed": round(elapsed_s, 6), "step": self._step(), "parts": parts, **more}
        # Each record begins with a newline, so that a record after an incomplete line is readable.
        line = b"\n" + json.dumps(record, separators=(",", ":")).encode()
        try:
            if self._handle >= 0 and os.write(self._handle, line) < len(line):
                self._failure = "the disk took only a part of a record"
        except OSError as error:
            self._failure = files.reason(error, Path(self.path))
        if warns and self._failure and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"The ledger {self.path} could not be written: {self._failure}. Training continues, and the ledger "
                "lacks records. Free disk space, or pass GoodputMonitor(dirpath=...) a folder that can be written."
            )
        return record

    def close(self, why: str) -> Report | None:
        """Write the run's last record. ``why``: "finished", "stopped" or "exception". Return the report if a write has
        failed, because the file then lacks records; else return ``None``.
        """
        self._over.set()
        self._thread.join()
        self.slot.saved = lambda: None
        self.write("end", why=why)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if not self._failure or (report := self.report()) is None:
            return None
        return replace(report, open=False, failures=report.failures + (why == "exception"))

    def _keep_writing(self) -> None:
        shortest_s, longest_s = _EVERY_S
        while not self._over.wait(min(longest_s, max(shortest_s, self.slot.times()[0] / _RECORDS_PER_AGE))):
            self.write("beat", warns=False)  # the main thread warns


_measured_by = -1  # the process that has called the function below; a forked child has another id


def since_process_start_s() -> float:
    """Return the age of this process in seconds. Return 0.0 if the age is unknown, and in all calls after the first."""
    global _measured_by
    if _measured_by == os.getpid():
        return 0.0
    _measured_by = os.getpid()
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
