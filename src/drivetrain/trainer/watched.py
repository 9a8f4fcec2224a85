"""A run of several processes is watched: by the process that has started the ranks, or by one that local rank 0 starts.

See :mod:`drivetrain.launchers.watch` for what that process does.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

from drivetrain.engine.watching import join
from drivetrain.launchers import stacks
from drivetrain.launchers.board import SHOWN, STALL

Trainer = Any  # not the class, which knows this file


def begin(trainer: Trainer) -> None:
    """Let this run be watched from now on, until :func:`drivetrain.trainer.shown.shown` is left."""
    stall_s = trainer.settings.stall_timeout_s
    if not stall_s:
        return
    sheet = join(trainer.strategy, trainer.plan.environment.creates_processes_externally)
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
