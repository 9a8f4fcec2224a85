"""The command ``drivetrain diff``: the first step, tensor and operation in which two recorded runs differ."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drivetrain.proof.judge import LOGGED, earliest, judge, summary
from drivetrain.proof.proving import first_operation, text_of
from drivetrain.proof.records import path_of, ranks_of, read
from drivetrain.proof.runs import Program, Run, files_in


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain diff") -> int:
    """Compare two folders that ``drivetrain prove-resume --folder`` has written.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: every step is equal. 1: one differs. 2: a folder has no records.
    """
    parser = argparse.ArgumentParser(
        prog,
        description="Compare the undisturbed runs in two folders of `drivetrain prove-resume --folder`, step by step. "
        "`--kills 0` there makes such a run and no other.",
    )
    parser.add_argument("folders", type=Path, nargs=2, metavar="FOLDER", help="a folder with a recorded run")
    parser.add_argument("--why", action="store_true", help="start both programs again up to the step that differs, and "
                        "name the first operation with another result")  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for each of these starts (default: 3600)"
    )
    given = parser.parse_args(arguments)
    records = [folder / "undisturbed" / "records" for folder in given.folders]
    ranks = [ranks_of(folder) for folder in records]
    if not all(ranks):
        missing = given.folders[0 if not ranks[0] else 1]
        print(f"{prog}: {missing} has no recorded run. Make one: drivetrain prove-resume --kills 0 --folder {missing} "
              "PROGRAM", file=sys.stderr)  # fmt: skip
        return 2
    if not (common := sorted(set(ranks[0]) & set(ranks[1]))):
        found = (f"{folder} has those of rank {', '.join(map(str, each))}" for folder, each in zip(given.folders, ranks))
        print(f"{prog}: the runs have no rank in common: {' and '.join(found)}. Record both with the same --ranks",
              file=sys.stderr)  # fmt: skip
        return 2
    runs = {rank: [read(path_of(folder, 0, rank)) for folder in records] for rank in common}
    found = [judge(one, [other], rank, resumes=False) for rank, (one, other) in runs.items()]
    first = earliest(found)
    if not first.differences:
        one = runs[common[0]][0]
        print(f"equal: {len(one.steps)} steps on {len(common)} ranks; hash {summary(one)}")
        return 0
    step, part = first.differences[0].step, first.differences[0].part
    print(f"optimizer step {step} is the first that differs, in the second run:")
    for each in first.differences[:8]:
        print(f"  {text_of(each)}")
    if first.equal:
        print(f"  equal there: {', '.join(first.equal)}")
    if given.why and part != LOGGED:
        with tempfile.TemporaryDirectory() as folder:
            again = [_run(each.absolute(), Path(folder, str(n))) for n, each in enumerate(given.folders)]
            print(f"  {first_operation(again[0], again[1], first.rank, (step - 1, step - 1), given.timeout)}")
    return 1


def _run(folder: Path, target: Path) -> Run:
    """Return a run of the program in ``folder`` as it was then, in ``target``, without the files that it wrote."""
    found = json.loads((folder / "program.json").read_text(encoding="utf-8"))
    files, old, source = set(found.pop("files")), found.pop("source"), folder / "undisturbed" / "work"
    for words in ("command", "resume"):
        found[words] = [word.replace(old + os.sep, f"{source}{os.sep}") for word in found[words]]
    run = Run(Program(**{**found, "source": source, "links": ()}), target)
    for path in files_in(run.work):
        if path.relative_to(run.work).as_posix() not in files:
            path.unlink()
    return run
