"""Save a checkpoint when a run ends with an exception."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.callback import Checkpoint, LightningModule, Trainer
from drivetrain.callbacks._checkpoint_arguments import check_place
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import rank_files
from drivetrain.trainer.after_exception import save_after_exception

BEFORE_TRAINING = "the exception came before this fit began to train, so there is no progress to resume from."


class OnExceptionCheckpoint(Checkpoint):
    """Writes a checkpoint if an exception, Ctrl-C or SIGTERM ends a fit.

    The callback replaces an earlier run's checkpoint only when the new checkpoint is complete. In the next run,
    ``ckpt_path="last"`` finds the checkpoint. Before training begins, the callback saves nothing and logs a line. With
    several processes, each process writes its own part of the checkpoint without waiting for other processes, which may
    be dead (see docs/checkpoints.md).

    Args:
        dirpath: the folder.
        filename: the file's name without extension.

    Raises:
        ConfigurationError: the name is empty, or the folder or the name is invalid.
    """

    FILE_EXTENSION = ".ckpt"
    saves_on_exception = True

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        super().__init__()
        if not filename or not isinstance(filename, str):
            raise ConfigurationError(
                f'OnExceptionCheckpoint(filename={filename!r}) names no file. Write filename="on_exception".'
            )
        check_place("OnExceptionCheckpoint", dirpath, filename)
        self.dirpath = files.absolute(dirpath)
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """The path to which the checkpoint is written."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def resume_candidates(self, trainer: Trainer) -> list[str]:
        store, path = trainer.strategy.checkpoint_io, self.ckpt_path
        return [*filter(store.exists, [path]), *rank_files.find_unfinished(store, path)]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        begun = trainer.progress.has_trained  # before training begins, the step count may come from an earlier fit
        if trainer.progress.fn == "fit" and begun and not trainer.fast_dev_run:
            rank_zero_info(save_after_exception(trainer, self.ckpt_path))
        elif trainer.progress.fn == "fit" and not trainer.fast_dev_run:
            rank_zero_info(f"OnExceptionCheckpoint saved nothing: {BEFORE_TRAINING}")
