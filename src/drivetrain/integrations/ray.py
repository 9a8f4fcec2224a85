"""Report a fit's metrics and checkpoints to Ray Train, and resume from the newest checkpoint that it has kept."""

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
"""The file in a reported checkpoint that names the checkpoint's file, and the fit that resumes from it."""


class RayTrainReportCallback(Callback):
    """Reports metrics and checkpoints to Ray Train, and resumes a fit that Ray Train has started again.

    The Trainer adds this callback in a worker of Ray Train. In other processes the callback does nothing.

    The callback reports when a ModelCheckpoint has written a checkpoint, with the files of this checkpoint, and at the
    end of each epoch without a new one. The metrics are ``trainer.callback_metrics``, ``epoch`` and ``step``. Ray
    copies the files into its storage before training continues; the machines need no other shared folder.

    A fit without ``ckpt_path`` resumes from the newest reported checkpoint of this fit. In a training function with
    several fits, those before it run again.
    """

    needs_every_rank = True

    def __init__(self) -> None:
        super().__init__()
        self._download = ExitStack()  # until the fit has read the checkpoint from which it resumes
        self._saved: dict[int, dict[str, float]] = {}  # the metrics at each save, by step
        self._reported = self._reported_with_files = -1  # the steps of the last reports
        self._reports = False  # while a fit trains in a worker

    def own_checkpoint(self, trainer: Trainer) -> str | None:
        """Return the checkpoint that this fit has reported before Ray Train started the workers again."""
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
        if self._reports:  # an observer is called after all callbacks, in whichever order they were passed
            report = functools.partial(self._report, trainer)
            trainer.hooks.observers.append(SimpleNamespace(checkpoint_saved=report, on_train_epoch_end=report))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._reports:
            self._saved[trainer.global_step] = _metrics(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._download.close()
        self._reports = False  # callbacks save after this: a report would wait for ranks that have not failed

    # ---- reporting -----------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, path: str | None = None, step: int | None = None) -> None:
        """Report the checkpoint ``path`` of ``step``; ``None``: only the current metrics. All ranks call it."""
        step = trainer.global_step if step is None else step
        if not self._reports or step == (self._reported if path is None else self._reported_with_files):
            return
        self._reported = step
        if path is None:
            ray_train.report({**_metrics(trainer), "step": step})
            return
        self._reported_with_files = step
        saved = self._saved.get(step)  # with saves in the background, training has continued since
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
    """Return the newest checkpoint that this process has not reported itself."""
    return ray_train.get_checkpoint()


def _metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | {"epoch": trainer.current_epoch}


def _link_files(trainer: Trainer, path: str, folder: str) -> None:
    """Link the files of a checkpoint into ``folder``: on rank 0 those that it sees, and on the first rank of each other
    machine those that rank 0 does not see.
    """
    if files.is_remote(path):
        return  # every machine can read it there
    parent = Path(path).parent
    here = [each.relative_to(parent) for each in _files_of(trainer, path)]
    seen_by_rank_zero = trainer.strategy.broadcast(here)
    if trainer.local_rank == 0:
        for name in here:
            if trainer.is_global_zero or name not in seen_by_rank_zero:
                (link := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(parent.absolute() / name)


def _files_of(trainer: Trainer, path: str) -> Iterator[Path]:
    """Yield the files of the checkpoint ``path`` that this machine has; a sharded checkpoint is a folder."""
    for each in map(Path, rank_files.files_of(trainer.strategy.checkpoint_io, path)):
        yield from (file for file in (each, *each.rglob("*")) if file.is_file())
