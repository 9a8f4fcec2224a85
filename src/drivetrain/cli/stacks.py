"""The command ``drivetrain stacks``: print which step, line and collective each rank of a running job executes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.cli.failed import failed
from drivetrain.launchers.board import FOLDER, Board
from drivetrain.launchers.stacks import process
from drivetrain.launchers.watch import Seen, missing, now_of, text_of


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Print what the ranks of a job on this machine do now: the phase, the line of your code and "
        "the collective in which each waits, which rank is missing there, and the stacks of all threads.",
    )  # fmt: skip
    made.add_argument("job", metavar="RUN_DIR|PID", help="the folder of the run, or any of the job's processes")
    made.add_argument("--json", action="store_true", help="print the positions as JSON")
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain stacks") -> int:
    """Print where each rank of a job is. Return 2 if no such job runs on this machine."""
    given = parser(prog).parse_args(arguments)
    job: str = given.job
    boards = list(_boards())
    pid = int(job) if job.isdigit() and not os.path.isdir(job) else None
    found = [board for board in boards if (_has_process(board, pid) if pid is not None else _is_in(board, job))]
    if found:
        seen = [(board, now_of(board)) for board in found]
        text = json.dumps({"jobs": [_as_data(*each) for each in seen]}, indent=2)
        print(text if given.json else "\n".join(text_of(now) for _, now in seen))
        return 0
    known = ", ".join(sorted({board.run_folder for board in boards if board.run_folder})) or "none"
    what = f"has the process {job}" if pid is not None else f"writes to {job}"
    return failed(
        f"{prog}: no job {what}. It looks at this user's jobs with several processes on this machine. Folders of "
        f"running jobs: {known}. They are looked for in {tempfile.gettempdir()}: set TMPDIR as the job has it.",
        given.json,
    )


def _as_data(board: Board, seen: Mapping[int, Seen]) -> dict[str, Any]:
    """Return the positions of a job's ranks as plain data for JSON."""
    absent, now = missing(seen), time.time()
    ranks = [
        {
            "rank": rank, "pid": each.answer.pid, "state": each.answer.process.state, "place": each.place,
            "line": each.answer.line, "stacks": each.answer.stacks,
            "waits_in": None if (waits := each.answer.waits_in) is None else str(waits),
            "waits_s": None if waits is None else max(0.0, now - waits.since),
            "missing": {str(other): why for other, why in absent.get(rank, {}).items()},
        }
        for rank, each in seen.items()
    ]  # fmt: skip
    return {"run_folder": board.run_folder, "ranks": ranks}


def _boards() -> Iterator[Board]:
    """Yield the boards of running jobs. A board is a folder in which ranks report to their launcher. Boards of ended
    jobs, which a killed launcher has left, are skipped.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            board = Board.found(folder)
            pids = [board.pid(each) for each in range(len(board.ranks))]
        except (OSError, ValueError):  # the folder belongs to another user, or was removed meanwhile
            continue
        if any(pid and not process(pid).is_dead for pid in pids):
            yield board


def _has_process(board: Board, pid: int) -> bool:
    return pid in (board.launcher, *(board.pid(each) for each in range(len(board.ranks))))


def _is_in(board: Board, folder: str) -> bool:
    """Whether the run's folder is ``folder`` or inside it."""
    run, wanted = os.path.realpath(board.run_folder), os.path.realpath(folder)
    return bool(board.run_folder) and os.path.commonpath((run, wanted)) == wanted
