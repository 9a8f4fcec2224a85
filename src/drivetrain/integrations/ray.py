"""Report a fit's metrics and checkpoints to Ray Train, and resume from the newest checkpoint that Ray Train has
kept.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivetrain.base import files
from drivetrain.base.packages import ray_train
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.clusters.ray_train import RayTrainEnvironment, is_worker
from drivetrain.strategies import rank_files
from drivetrain.trainer import last

__all__ = ["RayTrainEnvironment", "RayTrainReportCallback"]

_NOTE = "drivetrain.json"
"""The name of a file in each reported checkpoint. The file contains the name of the checkpoint's file, and the number
of the fit that can resume from the checkpoint.
"""


class RayTrainReportCallback(Callback):
    """Reports metrics and checkpoints to Ray Train, and resumes the fit when Ray Train starts the workers again.

    The Trainer adds this callback in a worker of Ray Train. In other processes the callback does nothing.

    When a ModelCheckpoint has written a checkpoint, the callback reports the metrics and the checkpoint's files. At the
    end of an epoch without a new checkpoint, the callback reports only the metrics. The metrics are
    ``trainer.callback_metrics``, ``epoch`` and ``step``. Training waits until Ray has copied the files to its storage.
    Apart from this storage, the machines need no shared folder.

    A fit without ``ckpt_path`` resumes from the newest checkpoint that this fit has reported. If the training function
    calls several fits, the fits before the resumed fit start again from the beginning.
    """

    needs_every_rank = True

    def __init__(self) -> None:
        super().__init__()
        self._download = ExitStack()  # removes the downloaded checkpoint after the fit has read it
        self._saved: dict[int, dict[str, float]] = {}  # the metrics at the save of each checkpoint, by step
        # the step of the last report, and of the last report with a checkpoint
        self._reported = self._reported_with_files = -1
        self._reports = False  # true while a fit trains in a worker of Ray Train

    def own_checkpoint(self, trainer: Trainer) -> str | None:
        """Return the newest checkpoint that this fit had reported before Ray Train started the workers again."""
        checkpoint = _checkpoint_at_start() if is_worker() else None
        if checkpoint is None:
            return None
        with ExitStack() as download:
            folder = download.enter_context(checkpoint.as_directory())
            note = Path(folder, _NOTE)
            told = json.loads(note.read_text()) if note.exists() else {}
            if told.get("fit") != last.finished_fits:
                return None
            self._download = download.pop_all()
        name: str = told["checkpoint"]
        return name if files.is_remote(name) else os.path.join(folder, name)

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._download.close()
        self._saved, self._reported, self._reported_with_files = {}, -1, -1
        self._reports = is_worker()
        # an observer and not a hook, because observers are called after all callbacks
        if self._reports:
            report = functools.partial(self._report, trainer)
            trainer.hooks.observers.append(SimpleNamespace(checkpoint_saved=report, on_train_epoch_end=report))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._reports:
            self._saved[trainer.global_step] = _metrics(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._download.close()
        # Do not report a checkpoint that a callback saves after the exception. A report waits for all ranks, and
        # perhaps only this rank has failed.
        self._reports = False

    # ---- reporting -----------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, path: str | None = None, step: int | None = None) -> None:
        """Report the checkpoint ``path`` of ``step``. Without ``path``, report only the current metrics. All ranks must
        call this method.
        """
        step = trainer.global_step if step is None else step
        if not self._reports or step == (self._reported if path is None else self._reported_with_files):
            return
        self._reported = step
        if path is None:
            ray_train.report({**_metrics(trainer), "step": step})
            return
        self._reported_with_files = step
        # The metrics at the time of the save. Training may have continued, because a checkpoint can be written in the
        # background.
        saved = self._saved.get(step)
        metrics = {**(_metrics(trainer) if saved is None else saved), "step": step}
        self._saved = {later: each for later, each in self._saved.items() if later > step}
        with tempfile.TemporaryDirectory() as folder:
            _link_files(trainer, path, folder)
            if trainer.is_global_zero:
                name = path if files.is_remote(path) else os.path.basename(path)
                fit = None if saved is None else last.finished_fits  # None: the checkpoint holds only weights
                Path(folder, _NOTE).write_text(json.dumps({"checkpoint": name, "fit": fit}))
            ray_train.report(metrics, checkpoint=ray_train.Checkpoint.from_directory(folder))


@functools.cache
def _checkpoint_at_start() -> Any:
    """Return the newest checkpoint that was reported before this process started."""
    return ray_train.get_checkpoint()


def _metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | {"epoch": trainer.current_epoch}


def _link_files(trainer: Trainer, path: str, folder: str) -> None:
    """Link the files of a checkpoint into ``folder``. Rank 0 links all files that its machine has. On each other
    machine, the first rank links the files that rank 0's machine does not have.
    """
    if files.is_remote(path):
        return  # every machine can read the file at this address
    parent = Path(path).parent
    here = [each.relative_to(parent) for each in _files_of(trainer, path)]
    seen_by_rank_zero = trainer.strategy.broadcast(here)
    if trainer.local_rank == 0:
        for name in here:
            if trainer.is_global_zero or name not in seen_by_rank_zero:
                (link := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(parent.absolute() / name)


def _files_of(trainer: Trainer, path: str) -> Iterator[Path]:
    """Yield the files of the checkpoint ``path`` that are on this machine, also the files in a sharded checkpoint's
    folder.
    """
    for each in map(Path, rank_files.files_of(trainer.strategy.checkpoint_io, path)):
        yield from (file for file in (each, *each.rglob("*")) if file.is_file())
