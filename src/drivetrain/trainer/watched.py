"""A run of several processes is watched: by the process that has started the ranks, or by one that local rank 0 starts.

See :mod:`drivetrain.launchers.watch` for what that process does.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from array import array
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.launchers import stacks, watcher
from drivetrain.launchers.board import FOLDER, SHOWN, STALL, Board, Sheet, join_board, own_sheet
from drivetrain.launchers.launcher import LAUNCHER

Trainer = Any  # not the class, which knows this file

_MEETING_S = 30.0  # that local rank 0 has to make the board
_boards = 0  # how many this process has made or joined: each has a key of its own in the job's store


def begin(trainer: Trainer) -> None:
    """Let this run be watched from now on, until :func:`drivetrain.trainer.shown.shown` is left."""
    stall_s = trainer.settings.stall_timeout_s
    if not stall_s:
        return
    sheet = own_sheet() or _join(trainer)
    if sheet is None:
        return
    if trainer.progress.slot is not sheet.words:
        words = sheet.words
        words[: len(trainer.progress.slot)] = array("q", trainer.progress.slot)
        words[SHOWN] = 1
        trainer.progress.show_in(words)
    with suppress(OSError):  # the folder is gone: the launching process was killed, or something cleans up
        if sheet.local_rank == 0:
            sheet.note_run_folder(str(trainer.log_dir or trainer.default_root_dir))
        stacks.listen(sheet.folder, sheet.local_rank)
    sheet.words[STALL] = max(1, round(stall_s * 1000))


def _join(trainer: Trainer) -> Sheet | None:
    """Make the board of this machine's ranks in local rank 0, with a process that watches them, and join it.

    ``None`` where a launcher of drivetrain's has started the ranks without one (Ray, torch_xla), where the processes
    did not meet at a store, and on systems without what the watching needs.
    """
    global _boards
    strategy = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or not environment.creates_processes_externally or LAUNCHER in os.environ:
        return None
    if "drivetrain.launchers._ray_actor" in sys.modules:  # its processes are Ray's
        return None
    if not watcher.can_watch() or not dist.is_initialized() or dist.get_backend() in ("mpi", "fake"):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store
    key = f"drivetrain/board/{restart}/{_boards}/{strategy.node_rank}"
    _boards += 1
    with suppress(RuntimeError, OSError, ValueError):  # watching is no reason for a run to fail
        if strategy.local_rank == 0:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER))
            first = strategy.global_rank - strategy.local_rank
            Board(folder, range(first, first + strategy.num_processes), strategy.world_size)
            sheet = join_board(folder, 0)
            store.set(key, str(folder))
            _start(folder)
            return sheet
        store.wait([key], timedelta(seconds=_MEETING_S))
        return join_board(Path(store.get(key).decode()), strategy.local_rank)
    return None


def _start(folder: Path) -> None:
    try:
        watcher.start(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
