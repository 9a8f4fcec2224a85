"""Start a process that watches the ranks of a job, unless drivetrain's launcher already watches the ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivetrain.launchers import stacks, watcher
from drivetrain.launchers.board import FOLDER, STALL, Board, Sheet, join_board, own_sheet
from drivetrain.launchers.folder import hold, sweep
from drivetrain.launchers.launcher import LAUNCHER

_MEETING_S = 30.0  # seconds in which local rank 0 must create the board


def begin(
    strategy: Any, starts_elsewhere: bool, run_folder: Callable[[], Any], stall_timeout_s: float | None
) -> Sheet | None:
    """Let a process watch this rank. Return the rank's sheet (memory that both processes share).

    To end the watching, set the sheet's entry ``STALL`` to 0.

    Args:
        strategy: provides the ranks.
        starts_elsewhere: whether another program, such as torchrun or Slurm, has started the processes.
        run_folder: a function that returns the folder into which the watching process writes stacks.
        stall_timeout_s: if a rank is in a collective for longer than this number of seconds, the rank is reported;
            ``None``: the rank is not watched.
    """
    if not stall_timeout_s or (sheet := join(strategy, starts_elsewhere)) is None:
        return None
    with suppress(OSError):  # the folder may have been removed
        if sheet.local_rank == 0:
            sheet.note_run_folder(str(run_folder()))
        stacks.listen(sheet.folder, sheet.local_rank)
    sheet.words[STALL] = max(1, round(stall_timeout_s * 1000))
    return sheet


def join(strategy: Any, starts_elsewhere: bool) -> Sheet | None:
    """Return this rank's sheet. The sheet is a part of the board, which is memory that ranks share with a watching
    process.

    If there is no board, local rank 0 creates a board and starts a watching process. The result is ``None`` if the
    processes have no common store, or if the system does not support watching. It is also ``None`` if drivetrain has
    started the ranks without a board: with torch_xla, or with Ray on other machines.
    """
    sheet = own_sheet()
    store: Any = strategy.world.store
    if store is None or not starts_elsewhere or LAUNCHER in os.environ or not watcher.can_watch():
        return sheet
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store if it restarts ranks
    key = f"drivetrain/board/{restart}/{strategy.node_rank}"
    with suppress(RuntimeError, OSError, ValueError):  # a failure to watch must not end the run
        if strategy.local_rank == 0:
            try:
                sheet = sheet or _make(strategy)
            finally:  # even after an error, because other ranks wait for the key
                store.set(key, str(sheet.folder) if sheet else "")
        elif sheet is None:
            store.wait([key], timedelta(seconds=_MEETING_S))
            if folder := store.get(key).decode():
                sheet = join_board(Path(folder), strategy.local_rank)
    return sheet


def _make(strategy: Any) -> Sheet:
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    hold(folder)  # keep the folder until this process ends
    first = strategy.global_rank - strategy.local_rank
    Board(folder, range(first, first + len(strategy.parallel_devices)), strategy.world_size)
    sheet = join_board(folder, 0)
    try:
        watcher.start(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sheet
