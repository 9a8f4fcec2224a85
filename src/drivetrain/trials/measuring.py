"""Runs trials of a program, and judges which cures make it faster. In each round, the unchanged program has one trial,
and so does each cure.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.cli.program import words_to_call
from drivetrain.errors import number_of
from drivetrain.proof.runs import CannotTryError, last_lines, run_to_end
from drivetrain.trials import VARIABLE

WARMUP = 4  # steps before the measurement: up to four workers deliver their first batches at once
LEAST_GAIN = 1.05  # a smaller gain is not worth a changed program
# A trial may take _LONGER times as long as the first trial, plus _GRACE_S for compiling.
_LONGER = 10.0
_GRACE_S = 120.0  # seconds


@dataclass
class Judgement:
    """The effect of a cure on the speed.

    Attributes:
        ratio: how many times faster the program is with the cure: the median over the rounds.
        low, high: the smallest and the largest ratio of a round.
        helps: whether the cure is faster beyond doubt. This needs at least two rounds. Each ratio must be above
            :data:`LEAST_GAIN`, and above the ratio between the fastest and the slowest round of the unchanged program.
    """

    ratio: float
    low: float
    high: float
    helps: bool


def judge(unchanged: Sequence[float], changed: Sequence[float]) -> Judgement:
    """Compare the samples per second of each round without and with a cure."""
    ratios = [new / old for new, old in zip(changed, unchanged, strict=True)]
    is_measured = len(ratios) > 1  # one round does not show how much the speed varies
    spread = max(unchanged) / min(unchanged)
    return Judgement(
        statistics.median(ratios), min(ratios), max(ratios), is_measured and min(ratios) > max(spread, LEAST_GAIN)
    )


@dataclass
class Tried:
    """A cure and its measurements.

    Attributes:
        name, write, note, why_not: as in :class:`drivetrain.trials.cures.Cure`.
        samples_per_s: the speed in each round. There are fewer rounds for a cure that clearly does not help.
        judgement: ``None``: the cure was not tried, failed, or was interrupted in the first round.
        failed: the error that has ended a trial; "" without an error.
    """

    name: str
    write: str
    note: str
    why_not: str
    samples_per_s: list[float] = field(default_factory=list)
    judgement: Judgement | None = None
    failed: str = ""


@dataclass
class Result:
    """The measurements of all rounds; the last round can be incomplete.

    Attributes:
        samples_per_s: the speed of the unchanged program in each round.
        cures: the cures in the order of their trials.
        steps: the number of optimizer steps that a trial measures.
    """

    samples_per_s: list[float] = field(default_factory=list)
    cures: list[Tried] = field(default_factory=list)
    steps: int = 0

    def helpful(self) -> list[Tried]:
        """The cures that help, the best first."""
        found = [(each.judgement.ratio, each) for each in self.cures if each.judgement and each.judgement.helps]
        return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


class Trials:
    """Runs trials of one program, each in a fresh process.

    Args:
        command: the words after ``python``.
        folder: an empty folder for everything that the trials write.
        steps: the number of optimizer steps that each trial measures; ``None``: 20, or more if 20 steps take less than
            a second.
        limit_s: the time limit of the first trial, in seconds.
        say: a function that gets a line of text about each trial.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, steps: int | None, limit_s: float, say: Callable[[str], Any]
    ) -> None:  # fmt: skip
        self._command, self._folder, self._steps = command, folder, steps
        self._limit_s, self._say, self._count = limit_s, say, 0

    def run(self, result: Result, rounds: int, only: Sequence[str] = ()) -> None:
        """Run at most ``rounds`` rounds, and store the measurements in ``result``. After a KeyboardInterrupt, it has
        the measurements so far.

        Raises:
            CannotTryError: the unchanged program fails or has no measurable fit, a name in ``only`` is unknown, or no
                cure applies.
        """
        found, seconds = self._trial("a first look at the program", looks=True)
        result.steps = self._steps = found["steps"]
        self._limit_s = min(self._limit_s, _GRACE_S + _LONGER * seconds)
        names = [each["name"] for each in found["cures"]]
        for name in only:
            if not any(name in (each, each.partition("=")[0]) for each in names):
                raise CannotTryError(f"--only {name} names no change of this program. Write one of {', '.join(names)}.")
        cures = [
            each for each in found["cures"] if not only or {each["name"], each["name"].partition("=")[0]} & {*only}
        ]
        result.cures += [Tried(each["name"], each["write"], each["note"], each["why_not"]) for each in cures]
        if all(each.why_not for each in result.cures):
            why = "; ".join(f"{each.name}: {each.why_not}" for each in result.cures)
            raise CannotTryError(f"no change applies to it. {why}.")
        names = [each.name for each in result.cures if not each.why_not]
        most = rounds * (1 + len(names))
        self._say(
            f"{number_of(len(names), 'change')} to try: {', '.join(names)}. At most {number_of(most, 'trial')}: "
            f"{most * seconds / 60:.1f} minutes if each takes {seconds:.0f} s as this one did; workers and compilers "
            "take longer. Ctrl-C ends it and prints what was measured."
        )
        for number in range(1, rounds + 1):
            if number > 1 and not any(map(_may_help, result.cures)):
                break
            where = f"round {number} of {rounds}"
            result.samples_per_s.append(self._trial(f"{where}: unchanged")[0]["samples_per_s"])
            for tried, cure in zip(result.cures, cures, strict=True):
                if (number > 1 and not _may_help(tried)) or tried.why_not:
                    continue
                try:
                    found, _ = self._trial(f"{where}: {tried.name}", cure=cure)
                except CannotTryError as error:
                    tried.failed, tried.judgement = str(error).splitlines()[0], None
                    continue
                tried.samples_per_s.append(found["samples_per_s"])
                tried.judgement = judge(result.samples_per_s, tried.samples_per_s)

    def _trial(
        self, name: str, cure: dict[str, Any] | None = None, looks: bool = False
    ) -> tuple[dict[str, Any], float]:
        """Run one trial, and return the trial's result and duration in seconds.

        Raises:
            CannotTryError: the trial has no result; the first line of the message is the cause.
        """
        began = time.monotonic()
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        result, log = folder / "result.json", folder / "output.txt"
        asked = {
            "result": str(result), "folder": str(folder), "steps": self._steps, "warmup": WARMUP, "cure": cure,
            "looks": looks,
        }  # fmt: skip
        # TMPDIR puts compilers' caches and workers' sockets into the folder. PYTHONDONTWRITEBYTECODE prevents
        # __pycache__.
        variables = {VARIABLE: json.dumps(asked), "TMPDIR": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *words_to_call("drivetrain.trials.child"), *self._command]
        code = run_to_end(command, Path.cwd(), variables, log, self._limit_s)
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if "samples_per_s" in found:
            self._say(f"{name}: {found['samples_per_s']:.4g} samples a second")
            return found, time.monotonic() - began
        if "refused" in found:
            raise CannotTryError(found["refused"])
        self._say(f"{name}: failed")
        raise CannotTryError(f"{found.get('failed') or _ending(code)}\n{last_lines(log)}")


def _may_help(tried: Tried) -> bool:
    """Whether to try the cure in another round. False if one ratio is already too small."""
    return tried.judgement is not None and tried.judgement.low > LEAST_GAIN


def _ending(code: int) -> str:
    """Say how a program ended that has written no result."""
    if code == -signal.SIGKILL:
        return "The system has killed it, as it does when memory runs out."
    if code:
        return f"It ends with exit code {code}."
    return (
        "The program ends without a call of trainer.fit. A trial changes what the Trainer gets: programs with an "
        "Engine, or with another trainer, are not measured."
    )
