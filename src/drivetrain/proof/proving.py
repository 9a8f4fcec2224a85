"""Prove that a program resumes exactly: run it, kill it, restart it, and judge."""

from __future__ import annotations

import platform
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import drivetrain
from drivetrain.proof.judge import LOGGED, Difference, Judgement, judge, logged_apart, summary
from drivetrain.proof.runs import GRACE_S, RUN, CannotTryError, Program, Run, kills_for, undisturbed


@dataclass
class Verdict:
    """What was found about a program.

    Attributes:
        code: 0: it resumes exactly; 1: it does not; 2: that could not be tried.
        message: the verdict in words.
        kills: for each kill the last step before it, and the step at which the program continued, counted from 1;
            ``None``: it made no step.
        steps: the optimizer steps of the undisturbed run.
        hash: 16 characters that depend on every step of that run.
        differences: what differs first, the cause before its effects.
        notes: what differs without any effect.
    """

    code: int
    message: str = ""
    kills: list[tuple[int | None, int | None]] = field(default_factory=list)
    steps: int = 0
    hash: str = ""
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    torch: str = torch.__version__
    drivetrain: str = drivetrain.__version__


def prove(
    program: Program, folder: Path, kills: int = 5, seed: int = 0, limit_s: float = 3600.0,
    say: Callable[[str], Any] = lambda line: None,
) -> Verdict:  # fmt: skip
    """Run ``program`` undisturbed and killed, and return the verdict.

    Args:
        program: what is run.
        folder: a folder for the runs.
        kills: how often it is killed.
        seed: draws the steps at which it is killed.
        limit_s: seconds for the undisturbed run.
        say: called with a line of text about what is done.

    Raises:
        CannotTryError: the program fails by itself, makes no step, or does not end; or two undisturbed runs differ.
    """
    reference = undisturbed(program, folder / "undisturbed", limit_s)
    first = reference.ranks()[0]
    steps = len(reference.starts(first)[0].steps)
    say(f"undisturbed: {steps} optimizer steps in {reference.seconds:.1f} s")
    if steps < 2:
        raise CannotTryError("The program makes a single optimizer step, so there is no step to kill it at.")
    killed, moments = Run(program, folder / "killed"), kills_for(reference, kills, seed)
    verdict = Verdict(0, steps=steps, hash=summary(reference.starts(first)[0]))
    code, deaths, limit_s = 0, 0, 3 * reference.seconds + GRACE_S
    for kill in [*moments, None]:
        code = killed.start(limit_s, kill, reference)
        found = _judged(reference, killed)
        if code == -signal.SIGKILL and kill is not None:
            deaths += 1
            say(f"killed in step {found.ended_in[-1] or '?'} of {steps}")
        if code != -signal.SIGKILL or found.differences:
            break
    began = found.started_at
    verdict.kills = list(zip(found.ended_in[:deaths], [*began[1:], None], strict=False))
    verdict.notes = found.notes
    if began[0] != 1:
        raise CannotTryError(
            f"The second run began at step {began[0]} of the first one, before it was killed: it finds files that the "
            f"first run has written. Write {RUN} in the program's arguments in place of the folder that it writes to."
        )
    if code not in (0, -signal.SIGKILL):
        after = f"after the kill in step {verdict.kills[-1][0]}" if verdict.kills else "in the second run"
        return _failed(verdict, f"started again {after}, it fails with exit code {code}. {killed.output()}")
    if found.differences and found.differences[0].part != LOGGED and found.start == 0:
        raise CannotTryError(_not_deterministic(found.differences[0], steps))
    if found.differences:
        say("a difference: once more undisturbed, to see whether the program repeats itself")
        found = _checked(reference, killed, undisturbed(program, folder / "again", limit_s), steps)
    if found.differences:
        return _differs(verdict, found)
    if len(began) > 1 and all(after == 1 for _, after in verdict.kills):
        return _failed(
            verdict,
            f"after each kill (in {_steps(at for at, _ in verdict.kills)}) it begins again at step 1. "
            "If it resumes only when asked to, pass --resume-args.",
        )
    reached = max(at or 0 for at, _ in verdict.kills)
    if began[-1] is None and reached < steps:
        return _failed(verdict, f"killed in step {reached} of {steps} and started again, it ends without another step.")
    verdict.message = "\n".join(
        [
            f"resumes exactly: {len(verdict.kills)} kills in {_steps(at for at, _ in verdict.kills)}, all {steps} steps "
            f"equal, hash {verdict.hash}, torch {verdict.torch}, drivetrain {verdict.drivetrain}, "
            f"Python {platform.python_version()}",
            *(f"note: {note}" for note in verdict.notes),
        ]
    )
    return verdict


def _judged(reference: Run, killed: Run, ignored: Iterable[str] = ()) -> Judgement:
    """Judge each rank, and return the judgement with the earliest difference, or else that of the first rank."""
    found = [judge(reference.starts(rank)[0], killed.starts(rank), rank, ignored) for rank in reference.ranks()]
    differing = [each for each in found if each.differences]
    return min(differing, key=lambda each: (each.start, each.differences[0].step)) if differing else found[0]


def _checked(reference: Run, killed: Run, again: Run, steps: int) -> Judgement:
    """Judge again, without what differs between two undisturbed runs.

    Raises:
        CannotTryError: the undisturbed runs differ in more than logged values.
    """
    apart: set[str] = set()
    for rank in reference.ranks():
        one, other = reference.starts(rank)[0], again.starts(rank)[0]
        for each in judge(one, [other], rank).differences:
            if each.part != LOGGED:
                raise CannotTryError(_not_deterministic(each, steps))
        apart |= logged_apart(one, other)
    found = _judged(reference, killed, apart)
    if apart:
        found.notes.append(f"two undisturbed runs differ in these logged values: {', '.join(sorted(apart))}")
    return found


def _not_deterministic(each: Difference, steps: int) -> str:
    return (
        f"The program is not deterministic: two undisturbed runs differ at step {each.step} of {steps}: {_text(each)}. "
        "Seed what it draws, and see torch.use_deterministic_algorithms."
    )


def _failed(verdict: Verdict, why: str) -> Verdict:
    verdict.code, verdict.message = 1, f"does not resume: {why}"
    return verdict


def _differs(verdict: Verdict, found: Judgement) -> Verdict:
    """Say what differs first."""
    verdict.code, verdict.differences = 1, found.differences
    first, [at, after] = found.differences[0], verdict.kills[found.start - 1]
    if first.part == LOGGED:
        head = "does not resume exactly: all steps are equal, but not what is logged:"
    else:
        where = f"which differs from step {first.step}" if first.step == after else f"and differs first at step {first.step}"
        head = f"does not resume exactly: killed in step {at}, it continued at step {after}, {where} of the undisturbed run:"
    lines = [f"  {_text(each)}" for each in found.differences[:8]]
    equal = [f"  equal there: {', '.join(found.equal)}"] if found.equal else []
    verdict.message = "\n".join([head, *lines, *equal, *(f"note: {note}" for note in found.notes)])
    return verdict


def _text(each: Difference) -> str:
    rank = f" on rank {each.rank}" if each.rank else ""
    step = f" at step {each.step}" if each.part == LOGGED else ""
    return f"{each.part}{rank}{step}" + (f": {each.detail}" if each.detail else "")


def _steps(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return f"step {found[0]}" if len(found) == 1 else f"steps {', '.join(map(str, found))}"
