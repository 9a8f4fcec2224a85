"""Save and go back into the cluster's queue when it announces that the job's time is over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.callbacks._checkpoint_files import save_new
from drivetrain.checkpoints.io import wait_for
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.trainer.checkpoint import numbered
from drivetrain.trainer.telling import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from drivetrain.module.module import LightningModule
    from drivetrain.trainer.trainer import Trainer


class Requeue(Callback):
    """On the cluster's signal in a fit: save a checkpoint, put the job back into the queue, end the run.

    The Trainer adds it if the cluster environment requeues: ``SLURMEnvironment(auto_requeue=True)``. The signal's
    handler only sets a flag. After the batch that all ranks have agreed on, ``hpc_ckpt_<n>.ckpt`` is written to
    ``default_root_dir``, and rank 0 puts the job back; the restarted job resumes from the highest such file of its
    own, in the fit that wrote it. During a validation the signal waits for the batch that follows.

    Args:
        environment: who this process is in the job, and how the job is put back.
    """

    position = "last"  # what it saves is complete

    _fits = 0  # begun in this process: a program may have several, and a file belongs to one of them
    _events = 0  # signals that were answered in this process: a key of the job's store is used once

    def __init__(self, environment: ClusterEnvironment) -> None:
        self.environment = environment
        self._told = self._saves = False
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = False

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
        if callable(self._before):
            self._before(number, frame)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.progress.earlier_batches + batch_idx + 1
        # Ranks that exchange gradients in every window are never further apart than one.
        wanted = done + trainer.limits.accumulate * (trainer.world_size > 1) if self._told else None
        moment = trainer.strategy.agree_on_moment(f"requeue/{Requeue._events}", wanted)
        if moment is not None and done >= moment:
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        self._told = False
        Requeue._events += 1
        self._saves = True
        try:
            path = self._next_path(trainer)
            while not save_new(trainer, path):  # another job has taken the number meanwhile
                path = self._next_path(trainer)
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
        """Return what the fit that is about to begin has left when the job went back into the queue."""
        if self.environment.restart_count() <= 0:
            return None
        files = numbered(trainer.default_root_dir, trainer.strategy.checkpoint_io)
        if not files:
            return None
        wanted = {"job": self.environment.requeue_id(), "fit": Requeue._fits + 1}
        for number in sorted(files, reverse=True):  # those of other jobs lie among them
            checkpoint = trainer.strategy.load_checkpoint(files[number])
            if isinstance(checkpoint, Mapping) and checkpoint.get("requeue") == wanted:
                return files[number]
        return None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._installed and self.environment.requeue_signal is not None:
            self._installed = False
            signal.signal(self.environment.requeue_signal, self._before)
