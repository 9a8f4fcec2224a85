"""Prove that a program resumes exactly: run, kill and restart the program, and compare the runs."""

from __future__ import annotations

import dataclasses
import json
import platform
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain.base.lazy import on_first_use
from drivetrain.errors import number_of
from drivetrain.proof.judge import LOGGED, WRITTEN, Difference, Judgement, earliest, judge, logged_apart, summary
from drivetrain.proof.records import OPERATIONS, forked_of, path_of
from drivetrain.proof.runs import GRACE_S, RUN, CannotTryError, Program, Run, installed_torch, kills_for, undisturbed

with on_first_use:
    from drivetrain.proof import operations, outputs


@dataclass
class Verdict:
    """The result of a proof.

    Attributes:
        code: 0: the program resumes exactly; 1: the program does not; 2: the proof could not be run.
        message: the verdict in words.
        kills: for each kill, the last step before the kill, and the step at which the program continued, counted from
            1; ``None``: no step after the kill.
        steps: the optimizer steps of the undisturbed run.
        hash: 16 characters that depend on every step of the undisturbed run.
        differences: the parts that differ at the first unequal step, causes before effects.
        notes: texts about differences without any effect, and about values that were not compared.
    """

    code: int
    message: str = ""
    kills: list[tuple[int | None, int | None]] = field(default_factory=list)
    steps: int = 0
    hash: str = ""
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    torch: str = field(default_factory=installed_torch)
    drivetrain: str = drivetrain.__version__
    python: str = platform.python_version()


def prove(
    program: Program, folder: Path, kills: int = 5, seed: int = 0, limit_s: float = 3600.0,
    say: Callable[[str], Any] = lambda line: None, why: bool = False,
) -> Verdict:  # fmt: skip
    """Run ``program`` undisturbed, run ``program`` with kills, and return the verdict.

    Args:
        program: the program to run.
        folder: a folder for the runs.
        kills: the number of kills.
        seed: the seed of the random steps at which the program is killed.
        limit_s: the time limit of the undisturbed run, in seconds.
        say: called with each line of progress.
        why: also name the first torch operation whose result differs.
    """
    try:
        return _prove(program, folder, kills, seed, limit_s, say, why)
    # for example, the program fails without a kill, or is not deterministic
    except CannotTryError as error:
        return Verdict(2, f"could not be tried: {error}")


def _prove(
    program: Program, folder: Path, kills: int, seed: int, limit_s: float, say: Callable[[str], Any], why: bool
) -> Verdict:
    reference = undisturbed(program, folder / "undisturbed", limit_s)
    text = json.dumps({**dataclasses.asdict(program), "source": str(program.source), "files": reference.files})
    (folder / "program.json").write_text(text + "\n", encoding="utf-8")
    one = reference.starts(reference.ranks()[0])[0]
    steps = len(one.steps)
    records = reference.records
    if any(path_of(records, 0, rank).exists() and forked_of(records, 0, rank) for rank in reference.ranks()):
        say("the program makes optimizer steps in a process that it forks, too: these are not compared")
    say(f"undisturbed: {number_of(steps, 'optimizer step')} in {reference.seconds:.1f} s")
    if not kills:
        return Verdict(0, f"recorded: {number_of(steps, 'step')}, hash {summary(one)}", [], steps, summary(one))
    if steps < 2:
        raise CannotTryError("The program makes a single optimizer step, so there is no step to kill it at.")
    killed, moments = Run(program, folder / "killed", keeps=why), kills_for(reference, kills, seed)
    if len(moments) < kills:
        say(f"--kills {kills}: of {steps} steps, each after the first gets one kill, so there are {len(moments)}")
    code, found = _kill_and_restart(killed, reference, moments, say)
    verdict = Verdict(0, "", found.kills, steps, summary(one))
    ends = ", ".join(str(at) for at, _ in found.kills)
    if found.started_at[0] != 1:
        raise CannotTryError(
            "The second run does not begin at the first step: it finds files that the first run has written outside of "
            f"its own folder. Write {RUN} in the program's arguments, in place of the folder that it writes to."
        )
    if code not in (0, -signal.SIGKILL):
        return _failed(
            verdict, f"killed in step {ends} and started again, it ends with exit code {code}. {killed.output()}"
        )
    if not found.differences:
        if not found.kills:
            raise CannotTryError("The program ends before it can be killed.")
        if found.started_at[-1] is None and found.kills[-1][0] != steps:
            return _failed(
                verdict, f"killed in step {ends} of {steps} and started again, it ends without another step."
            )
        if all(after == 1 for _, after in found.kills):
            asked = (
                " If it resumes only when asked to, pass --resume-args; drivetrain's Trainer needs "
                "DRIVETRAIN_RESUME=auto in the environment."
            ) * (not program.resume)
            return _failed(verdict, f"killed in step {ends} of {steps}, it begins again at step 1 each time.{asked}")
    found = _with_files(found, reference, killed)
    if found.differences:
        say("a difference: once more undisturbed, to see whether the program repeats itself")
        found = _checked(found, reference, killed, undisturbed(program, folder / "again", limit_s))
    verdict.notes, verdict.differences = found.notes, found.differences
    if found.differences:
        verdict.code, verdict.message = 1, _what_differs(found)
        if why and found.differences[0].part not in (LOGGED, WRITTEN):
            rank, at = found.rank, found.differences[0].step - 1
            steps_of = at, at + 1 - (found.started_at[found.start] or 1)
            again, limit_s = Run(program, folder / "operations"), 10 * killed.seconds + GRACE_S
            verdict.message += f"\n  {first_operation(again, killed.before(), (rank, rank), steps_of, limit_s)}"
    else:
        verdict.message = (
            f"resumes exactly: {steps} steps with {number_of(len(found.kills), 'kill')} (in step {ends}) equal those "
            f"without; hash {verdict.hash}, torch {verdict.torch}, drivetrain {verdict.drivetrain}, Python "
            f"{verdict.python}"
        )
    verdict.message = "\n".join([verdict.message, *(f"note: {note}" for note in found.notes)])
    return verdict


def _kill_and_restart(
    killed: Run, reference: Run, moments: Sequence[tuple[int, float]], say: Callable[[str], Any]
) -> tuple[int, Judgement]:
    """Kill and restart the program, until the program ends by itself or a difference is found. Return the program's
    last exit code and the judgement.
    """
    latest = 0
    for kill in [*moments, None]:
        code = killed.start(3 * reference.seconds + GRACE_S, kill, reference, latest)
        found = _judged(reference, killed)
        if code == -signal.SIGKILL:
            say(f"killed in step {found.ended_in[-1]} of {len(reference.starts(found.rank)[0].steps)}")
        if code != -signal.SIGKILL or found.differences:
            break
        latest = found.ended_in[-1] or latest
    return code, found


def _judged(reference: Run, killed: Run, ignored: Iterable[str] = ()) -> Judgement:
    """Compare the runs on each rank, and return the judgement with the earliest difference."""
    ranks = {each: (reference.starts(each)[0], killed.starts(each)) for each in reference.ranks()}
    return earliest([judge(*starts, rank, ignored) for rank, starts in ranks.items()])


def first_operation(
    one: Run, other: Run, ranks: tuple[int, int], steps: tuple[int, int], limit_s: float, tensor: str = ""
) -> str:
    """Start two runs again, each up to a step. Return a text that names the first operation whose result differs.

    If ``ranks`` are two ranks of one run, the text names the first operation after which ``tensor`` differs.
    """
    for run, rank, step in zip((one, other), ranks, steps, strict=True):
        # if the run takes too long, only the operation remains unknown
        with suppress(CannotTryError):
            run.start(limit_s, operations=(rank, step))
        if not (run.records / OPERATIONS).exists():
            return "the step could not be repeated, so the operation is not known"
    files = one.records / OPERATIONS, other.records / OPERATIONS
    if ranks[0] != ranks[1]:
        return operations.first_change(*files, ranks, tensor)
    return operations.first_difference(*files, min(steps) > 0, one.program.torch == other.program.torch)


def _with_files(found: Judgement, reference: Run, killed: Run, ignored: Collection[tuple[str, str]] = ()) -> Judgement:
    """If all steps are equal, add the differences between the files of the two runs to ``found``. Return ``found``."""
    if not found.differences:
        steps = len(reference.starts(found.rank)[0].steps)
        written = outputs.compare(reference.work, killed.work, reference.program.source, ignored)
        found.differences = [Difference(steps, WRITTEN, each) for each in written.different]
        if written.lacking:
            found.notes.append(f"only the undisturbed run has written: {', '.join(written.lacking[:5])}")
    return found


def _checked(found: Judgement, reference: Run, killed: Run, again: Run) -> Judgement:
    """Return a judgement that ignores all logged values and files that differ even between two undisturbed runs.

    Raises:
        CannotTryError: the undisturbed runs differ in more than logged values and files.
    """
    apart: set[str] = set()
    same = found if found.start == 0 else Judgement()
    for rank in reference.ranks():
        one, other = reference.starts(rank)[0], again.starts(rank)[0]
        for each in [*same.differences, *judge(one, [other], rank).differences]:
            if each.part not in (LOGGED, WRITTEN):
                when = ", before the model is built" if (each.step, each.part) == (1, "parameters") else ""
                raise CannotTryError(
                    f"The program is not deterministic: two undisturbed runs differ at step {each.step} of "
                    f"{len(one.steps)}: {text_of(each)}. Seed what it draws{when}; see "
                    "torch.use_deterministic_algorithms."
                )
        apart |= logged_apart(one, other)
    columns = outputs.compare(reference.work, again.work, reference.program.source).columns
    found = _with_files(_judged(reference, killed, apart), reference, killed, columns)
    if names := apart | {column for _, column in columns}:
        found.notes.append(f"not compared, because two undisturbed runs differ there: {', '.join(sorted(names))}")
    return found


def _failed(verdict: Verdict, why: str) -> Verdict:
    verdict.code, verdict.message = 1, f"does not resume: {why}"
    return verdict


def _what_differs(found: Judgement) -> str:
    """Return a text about the first difference between the runs."""
    first = found.differences[0]
    if first.part in (LOGGED, WRITTEN):
        what = "what is logged" if first.part == LOGGED else "the files that it writes"
        head = f"does not resume exactly: all steps are equal, but not {what}:"
    else:
        at, after = found.kills[max(found.start - 1, 0)]
        where = "this step" if first.step == after else f"step {first.step}"
        head = (
            f"does not resume exactly: killed in optimizer step {at}, it continued with {after}; {where} is not equal:"
        )
    lines = [f"  {text_of(each)}" for each in found.differences[: 1 if first.part == LOGGED else 8]]
    if (more := len(found.differences) - len(lines)) > 0:
        lines.append(f"  and {more} more")
    equal = [f"  equal there: {', '.join(found.equal)}"] if found.equal else []
    return "\n".join([head, *lines, *equal])


def text_of(each: Difference) -> str:
    """Return a line of text about a difference."""
    rank = f" on rank {each.rank}" if each.rank else ""
    return f"{each.part}{rank}" + (f": {each.detail}" if each.detail else "")
