"""The command ``drivetrain diff``: find the first step, tensor and operation in which two recorded runs or ranks
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.cli.failed import failed
from drivetrain.proof.judge import LOGGED, Judgement, earliest, judge, judge_ranks, summary
from drivetrain.proof.proving import first_operation, text_of
from drivetrain.proof.records import Start, ranks_of, start_of
from drivetrain.proof.runs import CannotTryError, Program, Run, files_in


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog,
        description="Compare the undisturbed runs in two folders of `drivetrain prove-resume --folder`, step by step; "
        "or, with one folder, the ranks of its run. `--kills 0` there makes an undisturbed run and no other.",
    )
    made.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="one or two folders with recorded runs")
    made.add_argument("--ranks", type=int, nargs=2, metavar="RANK",
                        help="with one folder: the ranks to compare (default: each with the first)")  # fmt: skip
    made.add_argument("--why", action="store_true", help="start both programs again up to the step that differs, and "
                        "name the first operation with another result")  # fmt: skip
    made.add_argument("--timeout", type=float, default=3600.0, help="seconds for each start (default: 3600)")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain diff") -> int:
    """Compare the runs in two folders, or the ranks of the run in one folder. ``drivetrain prove-resume --folder`` has
    written the folders.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: every step is equal. 1: a step differs. 2: there are no records that can be compared.
    """
    made = parser(prog)
    given = made.parse_args(arguments)
    if len(given.folders) > (1 if given.ranks else 2):
        made.error("name two folders, or one folder whose ranks are compared: FOLDER --ranks 0 1")
    try:
        found, equal, head = _of_runs(given.folders) if given.folders[1:] else _of_ranks(given.folders[0], given.ranks)
        has_operation = bool(found.differences) and found.differences[0].part != LOGGED
        has_operation = has_operation and (found.against is None or bool(found.tensor))
        operation = _operation(given.folders, found, given.timeout) if given.why and has_operation else ""
    except CannotTryError as error:
        return failed(f"{prog}: {error}", given.json)
    if given.json:
        differences = [each._asdict() for each in found.differences]
        parts = {"equal": not differences, "differences": differences, "equal_parts": found.equal, "notes": found.notes}
        print(json.dumps({**parts, "operation": operation}, indent=2))
    else:
        print("\n".join(_lines(found, equal, head, operation)))
    return 1 if found.differences else 0


def _lines(found: Judgement, equal: str, head: str, operation: str) -> Iterator[str]:
    if found.differences:
        yield f"optimizer step {found.differences[0].step} is the first {head}:"
        yield from (f"  {text_of(each)}" for each in found.differences[:8])
        if found.equal:
            yield f"  equal there: {', '.join(found.equal)}"
        if operation:
            yield f"  {operation}"
    else:
        yield equal
    yield from (f"note: {note}" for note in found.notes)


def _of_runs(folders: Sequence[Path]) -> tuple[Judgement, str, str]:
    """Compare two runs. Return the first difference, and two texts: the text to print if the runs are equal, and the
    text to print if the runs differ.
    """
    one, other = map(_ranks_in, folders)
    if not (common := [rank for rank in one if rank in other]):
        each = (f"{folder} has rank {_listed(ranks)}" for folder, ranks in zip(folders, (one, other), strict=True))
        raise CannotTryError(
            f"the runs have no rank in common: {' and '.join(each)}. Record both with the same --ranks"
        )
    versions = [_program(folder).get("torch") for folder in folders]
    starts = {rank: [_start(folder, rank) for folder in folders] for rank in common}
    found = [judge(was, [now], rank, resumes=False) for rank, (was, now) in starts.items()]
    was = starts[common[0]][0]
    equal = f"equal: {len(was.steps)} steps on {len(common)} rank{'s' * (len(common) != 1)}; hash {summary(was)}"
    first = earliest(found)
    if versions[0] != versions[1]:
        first.notes.append(f"recorded with torch {versions[0]} and torch {versions[1]}")
    return first, equal, "that differs, in the second run"


def _of_ranks(folder: Path, wanted: Sequence[int] | None) -> tuple[Judgement, str, str]:
    """Compare each rank of one run with the first rank. Return a judgement and two texts, as :func:`_of_runs` does."""
    ranks = _ranks_in(folder)
    wanted = wanted or ranks
    if len({*wanted} & {*ranks}) < max(len(wanted), 2):
        raise CannotTryError(
            f"{folder} has records of rank {_listed(ranks)}. Name a second folder, or two ranks of this one: "
            f"drivetrain diff {folder} --ranks 0 1. To record ranks: drivetrain prove-resume --kills 0 --ranks 2 "
            "--folder FOLDER PROGRAM"
        )
    one = _start(folder, wanted[0])
    if one.steps[0].get("is_sharded"):
        raise CannotTryError(f"the ranks of {folder} hold parts of the parameters, not copies, so they differ")
    found = earliest([judge_ranks(one, _start(folder, rank), wanted[0], rank) for rank in wanted[1:]])
    equal = f"equal: {len(one.steps)} steps on ranks {_listed(wanted)}; not compared: batch, loss, random state"
    return found, equal, f"in which rank {wanted[0]} and rank {found.rank} differ"


def _ranks_in(folder: Path) -> list[int]:
    if found := ranks_of(folder / "undisturbed" / "records"):
        return found
    raise CannotTryError(
        f"{folder} has no recorded run. Make one: drivetrain prove-resume --kills 0 --folder {folder} PROGRAM"
    )


def _start(folder: Path, rank: int) -> Start:
    if (found := start_of(folder / "undisturbed" / "records", 0, rank)).steps:
        return found
    raise CannotTryError(f"{folder} has no recorded step of rank {rank}. Record the run again")


def _program(folder: Path) -> dict[str, Any]:
    """Return the recorded description of the program. ``folder`` contains a run of the program."""
    try:
        found: dict[str, Any] = json.loads((folder / "program.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # program.json is written only at the end of the run
        raise CannotTryError(f"the run in {folder} was interrupted. Record it again") from None
    return found


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _operation(folders: Sequence[Path], found: Judgement, limit_s: float) -> str:
    """Return the name of the first operation that differs. To find the operation, run both programs again. To compare
    two ranks of one program, run the program twice.
    """
    step, ranks = found.differences[0].step - 1, (found.rank if found.against is None else found.against, found.rank)
    with tempfile.TemporaryDirectory() as target:
        one, other = (_run(each.absolute(), Path(target, str(n))) for n, each in enumerate([*folders, *folders][:2]))
        for run in (one, other):
            command = shlex.join([run.program.python, *run.program.launcher, *run.program.command])
            print(f"starting with torch {run.program.torch}: {command}", file=sys.stderr, flush=True)
        return first_operation(one, other, ranks, (step, step), limit_s, found.tensor)


def _run(folder: Path, target: Path) -> Run:
    """Prepare to run the recorded program of ``folder`` again in ``target``. The copy in ``target`` does not get the
    files that the program has written.
    """
    found = _program(folder)
    files, old, source = set(found.pop("files")), found.pop("source"), folder / "undisturbed" / "work"
    for words in ("command", "resume"):
        found[words] = [word.replace(old + os.sep, f"{source}{os.sep}") for word in found[words]]
    # the run was recorded on a different machine: use the Python and the torch of this process
    if not os.access(found.get("python", ""), os.X_OK):
        found = {key: value for key, value in found.items() if key not in ("python", "torch")}
    run = Run(Program(**{**found, "source": source, "links": ()}), target)
    for path in files_in(run.work):
        if path.relative_to(run.work).as_posix() not in files:
            path.unlink()
    return run
