"""Report how the runs of a training spent their time, and how often a run should save. The runs record their times in a
file, the ledger, which ``ledger.py`` writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from drivetrain.base import files
from drivetrain.base.restoring import COUNT, WrongForm, expect, number
from drivetrain.errors import number_of

NAME = "ledger.jsonl"
VERSION = 1
"""The version of a record's layout. :func:`read` skips and counts records of another version."""

PARTS = ("step", "data", "validation", "save", "start")
"""The parts of a run's time. A :class:`Report` has two more: "lost" and "idle"."""

WITHOUT_FAILURE_S = 600.0
"""If no run has failed yet, the mean time between failures is estimated as the running time plus these seconds."""

FIRST_SAVE_S = 1.0
"""The seconds of training before the first save. The number is small, because only a save shows how long saves take."""

_WORK = PARTS[:-1]  # this time is lost if the next run has to repeat the work
_LONGEST_S = 1e12  # a limit, so that sums stay finite


def _seconds(value: Any, place: str = "") -> float:
    """Return ``value``. Raise if ``value`` is not a finite number, because Python's JSON parser accepts NaN and
    infinity.
    """
    if not abs(number(value, place)) < _LONGEST_S:
        raise WrongForm(place, f"is {value}, and a number of seconds is expected")
    return float(value)


_RECORD = {
    "run": str, "event": str, "time": _seconds, "elapsed": _seconds, "step": COUNT,
    "parts": dict.fromkeys(PARTS, _seconds), "resumed?": bool, "why?": str,
}  # fmt: skip
Record = dict[str, Any]


@dataclass
class Report:
    """How the runs of a training spent the wall time, from the start of the first run to the last record.

    Attributes:
        seconds: the seconds of each part. "step": training steps that count, with their hooks and logging; "data":
            waiting for a batch; "validation"; "save": waiting for checkpoints; "start": the set-up before the first
            batch, and the time after the last epoch; "lost": the work after the step at which the next run resumed;
            "idle": between two runs.
        wall_s: the wall time in seconds. The parts add up to this time.
        runs: the number of runs.
        failures: the number of runs that an exception or a kill has ended. If the end of the last run is not recorded,
            that run does not count, because it may still be running.
        open: whether the end of the last run is not recorded, because it is still running or was killed.
        saves, save_s: the number of saves and their seconds, including saves whose time is lost.
        overlaps: the number of runs that began before the previous run's last record, because two programs write to one
            ledger.
        unread: the number of lines that could not be read, and of records of another version.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PARTS, "lost", "idle"), 0.0))
    wall_s: float = 0.0
    runs: int = 0
    failures: int = 0
    open: bool = False
    saves: int = 0
    save_s: float = 0.0
    overlaps: int = 0
    unread: int = 0

    @property
    def goodput(self) -> float:
        """The share of the wall time that was spent in training steps whose work was kept, from 0 to 1."""
        return self.seconds["step"] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def failure_interval_s(self) -> float:
        """The mean running time between failures in seconds; the time between two runs does not count."""
        running_s = self.wall_s - self.seconds["idle"]
        return running_s / self.failures if self.failures else running_s + WITHOUT_FAILURE_S

    @property
    def save_interval_s(self) -> float:
        """The number of seconds that should pass between two saves: see :func:`best_interval_s`."""
        return best_interval_s(self.save_s / self.saves, self.failure_interval_s) if self.saves else FIRST_SAVE_S

    def line(self) -> str:
        """Return the report as one sentence."""
        shares = (f"{name} {value / (self.wall_s or 1):.1%}" for name, value in self.seconds.items())
        runs = f"{number_of(self.runs, 'run')}, {self.failures} failed"
        return f"Goodput {self.goodput:.1%} of {self.wall_s:.0f} s in {runs}: {', '.join(shares)}."

    def notes(self) -> list[str]:
        """Return sentences about missing or doubtful records."""
        found = ["The last run has not ended, or was killed."] if self.open else []
        if self.unread:
            found.append(f"Lines left out, because they are cut or of another version: {self.unread}.")
        if self.overlaps:
            found.append(f"Runs that began before the one before had ended: {self.overlaps}. Their times are added.")
        return found


class _Run:
    """The records of one run. ``counts`` contains for each part the seconds that were not lost."""

    def __init__(self, records: list[Record]) -> None:
        first, self.last, self.records = records[0], records[-1], records
        self.began = first["time"] - first["elapsed"]
        self.ended = self.began + self.last["elapsed"]
        self.why = next((each.get("why", "") for each in records if each["event"] == "end"), None)
        self.counts: dict[str, float] = dict(self.last["parts"])

    def keep_until(self, step: int, saved: bool) -> None:
        """Count only the work up to ``step``, because a later run repeats the work after ``step``; -1: count no work.

        ``saved``: whether the later run resumes from a checkpoint of ``step``. If false, the same Trainer was called
        again, and continues from its state in memory.
        """
        kept = self._parts_at(step, saved)
        self.counts.update({name: min(self.counts[name], kept[name]) for name in _WORK})

    def _parts_at(self, step: int, saved: bool) -> dict[str, float]:
        before: Record = {"step": -1, "parts": dict.fromkeys(PARTS, 0.0)}
        after = None
        for record in self.records:
            if saved and record["step"] == step and record["event"] == "save":
                before, after = record, record
            elif record["step"] <= step and after is None:
                before = record
            elif record["step"] > step:
                after = after or record
                break
        if after is None:
            before = after = before if step < 0 else self.last
        share = (step - before["step"]) / ((after["step"] - before["step"]) or 1)
        pairs = ((name, before["parts"][name], after["parts"][name]) for name in PARTS)
        return {name: start + share * (end - start) for name, start, end in pairs}


def read(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Return the records of a ledger, and the number of lines that are not records of this version.

    A kill or a full disk may leave an incomplete line.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    records, unread = list[Record](), 0
    for line in filter(None, files.read(path).split(b"\n")):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or record.get("v") != VERSION:
                raise WrongForm("", "is no record of this version")
            records.append(expect(record, _RECORD))
        except (ValueError, RecursionError, WrongForm):
            unread += 1
    return records, unread


def account(records: Iterable[Record], unread: int = 0) -> Report:
    """Return the report of the newest training in a ledger.

    A run that resumes from a checkpoint, or starts at a step above 0, continues the previous run's training at that
    step. The work that earlier runs did after that step is lost. Any other run begins at step 0. It is a new training
    if the previous run has finished. Else it repeats the previous training, and all work of earlier runs is lost.
    """
    by_run: dict[str, list[Record]] = {}
    for record in records:
        by_run.setdefault(record["run"], []).append(record)
    runs: list[_Run] = []
    for own in by_run.values():
        begin = next((each for each in own if each["event"] == "train"), None)
        if begin is not None:
            resumed, step = begin.get("resumed", False), begin["step"]
            continues = resumed or step > 0
            if runs and runs[-1].why == "finished" and not continues:
                runs.clear()
            for run in runs:
                run.keep_until(step if continues else -1, resumed)
        runs.append(_Run(own))
    return _sum(runs, unread)


def _sum(runs: list[_Run], unread: int) -> Report:
    report = Report(runs=len(runs), unread=unread, open=bool(runs) and runs[-1].why is None)
    seconds = report.seconds
    for index, run in enumerate(runs):
        for name in PARTS:
            seconds[name] += run.counts[name]
            seconds["lost"] += run.last["parts"][name] - run.counts[name]
        gap = run.began - runs[index - 1].ended if index else 0.0
        seconds["idle"] += max(0.0, gap)
        report.overlaps += gap < -1.0  # a smaller overlap is a difference between two machines' clocks
        report.wall_s += run.last["elapsed"] + max(0.0, gap)
        report.failures += run.why == "exception" or (run.why is None and index < len(runs) - 1)
        report.saves += sum(each["event"] == "save" for each in run.records)
        report.save_s += run.last["parts"]["save"]
    return report


def best_interval_s(stall_s: float, failure_interval_s: float) -> float:
    """Return after how many seconds of training the next checkpoint should be saved.

    Short intervals lose time to saving. Long intervals lose time to work that is repeated after a failure. The interval
    with the smallest expected loss is about ``sqrt(2 * stall_s * failure_interval_s)`` (Young, 1974). This function
    computes Daly's estimate of a higher order ("A higher order estimate of the optimum checkpoint interval for restart
    dumps", 2006).

    Args:
        stall_s: the seconds for which a save stops the training.
        failure_interval_s: the mean time between failures in seconds.
    """
    ratio = stall_s / (2 * failure_interval_s)
    if ratio >= 1:
        return failure_interval_s
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * stall_s * failure_interval_s) * series - stall_s
