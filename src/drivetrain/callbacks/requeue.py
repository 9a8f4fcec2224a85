"""Save a checkpoint and requeue the job when the cluster signals that the job's time is nearly over."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.callbacks._checkpoint_durability import save_new
from drivetrain.checkpoints.io import wait_for
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.loops.stop import REQUEUE, Stop
from drivetrain.trainer.checkpoint import numbered
from drivetrain.trainer.telling import tell


class Requeue(Callback):
    """Saves a checkpoint, requeues the job and ends the run when the cluster's signal arrives in a fit.

    The Trainer adds the callback if the cluster environment requeues jobs: ``SLURMEnvironment(auto_requeue=True)``. The
    signal's handler only records the signal. All ranks then agree on a training or validation batch (see
    :mod:`drivetrain.loops.stop`). After this batch, ``hpc_ckpt_<n>.ckpt`` is written to ``default_root_dir``, and rank
    0 requeues the job. The restarted job resumes the interrupted fit from that fit's file with the highest number. A
    signal during the set-up takes effect at the first training batch.

    Args:
        environment: the cluster environment, which requeues the job.
    """

    position = "last"  # run after the other callbacks, so that the checkpoint is complete

    _fits = 0  # the number of fits that this process has begun; each checkpoint contains the number of its fit

    def __init__(self, environment: ClusterEnvironment) -> None:
        super().__init__()
        self.environment = environment
        self._told = self._saves = False
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = False
        self._stopper: Stop | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        number = self.environment.requeue_signal
        Requeue._fits += stage == "fit"
        if stage != "fit" or number is None or threading.current_thread() is not threading.main_thread():
            return
        self._told = False
        self._before = signal.signal(number, self._note)
        self._installed = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        if self._stopper is not None:
            self._stopper.ask(REQUEUE)
        if callable(self._before):
            self._before(number, frame)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._installed or trainer.current_run is None:
            return
        stopper = trainer.current_run.stopping.stopper
        if stopper is None:
            rank_zero_warn(
                "auto_requeue has no effect: the processes of this job have no key-value store in which they could "
                "agree on the batch after which they save. Save with ModelCheckpoint, and resume with "
                'ckpt_path="last".'
            )
            return
        stopper.answers[REQUEUE] = functools.partial(self._go_back, trainer)
        self._stopper = stopper
        if self._told:
            stopper.ask(REQUEUE)

    def _go_back(self, trainer: Trainer) -> None:
        self._told = False
        self._saves = True
        try:
            while not save_new(trainer, path := self._next_path(trainer)):
                continue  # another job has just used this number
            wait_for(trainer.strategy.checkpoint_io, path)
        finally:
            self._saves = False
        if trainer.loggers and trainer.is_global_zero:
            tell(trainer, "save")
        why_not = self.environment.requeue() if trainer.is_global_zero else None
        why_not = trainer.strategy.broadcast(why_not)
        if why_not is None:
            rank_zero_info(f"Saved {path}. The job is back in the queue and will resume from this file.")
            raise SystemExit(128 + int(self.environment.requeue_signal or 0))
        rank_zero_warn(f"Saved {path}, but the job could not be put back into the queue: {why_not} Training continues.")

    def _next_path(self, trainer: Trainer) -> str:
        number = 1 + max(numbered(trainer.default_root_dir, trainer.strategy.checkpoint_io), default=0)
        return os.path.join(trainer.default_root_dir, f"hpc_ckpt_{number}.ckpt")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._saves:
            checkpoint["requeue"] = {"job": self.environment.requeue_id(), "fit": Requeue._fits}

    def own_checkpoint(self, trainer: Trainer) -> str | None:
        """Return the newest checkpoint that this fit wrote before the job was requeued; ``None`` if there is none."""
        if self.environment.restart_count() <= 0:
            return None
        files = numbered(trainer.default_root_dir, trainer.strategy.checkpoint_io)
        wanted = {"job": self.environment.requeue_id(), "fit": Requeue._fits + 1}
        for number in sorted(files, reverse=True):  # other jobs may have written some of the files
            checkpoint = trainer.strategy.load_checkpoint(files[number])
            if isinstance(checkpoint, Mapping) and checkpoint.get("requeue") == wanted:
                return files[number]
        return None

    def teardown(self, *_: Any, **more: Any) -> None:
        self._stopper = None
        if self._installed and self.environment.requeue_signal is not None:
            self._installed = False
            signal.signal(self.environment.requeue_signal, self._before)

    on_exception = teardown
