"""Record how a training spends its wall time, and how much time restarts and failures cost. The file with the records
is called the ledger.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.callbacks._checkpoint_arguments import check_place
from drivetrain.errors import ConfigurationError, wrong_value
from drivetrain.loops.goodput import NAME, Report, account, read
from drivetrain.loops.ledger import Ledger, TimedSlot, since_process_start_s
from drivetrain.trainer.telling import log


class GoodputMonitor(Callback):
    """Writes the file ``ledger.jsonl``, which records how fits spend their wall time. Later runs append to this file.

    ``trainer.goodput`` is the share of the wall time that was spent in training steps. A step that is repeated after a
    failure counts only once. If there are loggers, the share is logged as ``goodput`` whenever the Trainer writes to
    the loggers. When a fit that continues earlier runs ends, the callback logs a summary of all runs. The command
    ``drivetrain goodput FOLDER`` prints how the wall time was spent. Only rank 0 measures and writes.

    Args:
        dirpath: the folder of the ledger; ``None`` means the folder of the first callback that writes checkpoints, or
            ``default_root_dir`` without such a callback. The folder must be the same after a restart. If the
            checkpoints are at an address such as ``s3://bucket/run``, the ledger is in ``default_root_dir``, because it
            must be a local file.

    Raises:
        ConfigurationError: ``dirpath`` is not a local folder; or the Trainer of a run has two GoodputMonitors.
    """

    changes_in_validation = False

    def __init__(self, dirpath: str | Path | None = None) -> None:
        super().__init__()
        check_place("GoodputMonitor", dirpath, None)
        if dirpath is not None and files.is_remote(dirpath):
            raise wrong_value("GoodputMonitor", "dirpath", dirpath, "a local folder", 'dirpath="checkpoints"')
        self.dirpath = None if dirpath is None else files.absolute(dirpath)
        self._slot: TimedSlot | None = None  # measures a fit; only on rank 0
        self._ledger: Ledger | None = None
        self._unwritten: Report | None = None  # the report of the last fit, if some records could not be written

    def path(self, trainer: Trainer) -> str:
        """Return the path of the ledger."""
        folders = [self.dirpath, *(getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks)]
        folder = next(filter(None, folders), None)
        if folder is None or files.is_remote(folder):
            folder = files.absolute(trainer.default_root_dir)
        return os.path.join(folder, NAME)

    def report(self, trainer: Trainer) -> Report | None:
        """Return a report of how the wall time was spent until now; ``None`` if there is no ledger yet.

        During a fit, rank 0 returns the report from memory. After a fit that could not write all records, rank 0
        returns that fit's report from memory, too. In all other cases, this method reads the ledger.

        Raises:
            OSError: the ledger cannot be read.
        """
        own = self._unwritten if self._ledger is None else self._ledger.report()
        if own is not None:
            return own
        path = self.path(trainer)
        return account(*read(path)) if not files.is_remote(path) and files.is_file(path) else None

    @property
    def save_interval_s(self) -> float:
        """The recommended number of seconds between two saves; ``inf`` on ranks above 0."""
        report = None if self._ledger is None else self._ledger.report()
        return math.inf if report is None else report.save_interval_s

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if sum(isinstance(each, GoodputMonitor) for each in trainer.callbacks) > 1:
            raise ConfigurationError(
                "There are two GoodputMonitors in callbacks, and both would count the same time. Keep one."
            )
        self.idle_hooks = frozenset() if trainer.loggers else frozenset({"on_train_batch_end"})
        self._slot = self._ledger = None
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            self._slot = TimedSlot(trainer.progress.slot, since_process_start_s())
            trainer.progress.show_in(self._slot)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # not in setup(), because the folder may depend on a logger's version, which is known only now
        if self._slot is not None:
            self._ledger = Ledger(self.path(trainer), self._slot, lambda: trainer.progress.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ledger is not None:
            self._ledger.begin_training(resumed=trainer.ckpt_path is not None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._ledger is not None and trainer.progress.flush_due:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ledger is not None and trainer.loggers:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if (goodput := trainer.goodput) is not None:
            log(trainer, {"goodput": goodput}, trainer.logger_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        report = None if self._ledger is None else self._ledger.report()
        self._close("finished")
        if report is not None and report.runs > 1:
            rank_zero_info(f"{report.line()} See {self.path(trainer)}.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        asked = isinstance(exception, (KeyboardInterrupt, SystemExit))
        self._close("stopped" if asked else "exception")

    def _close(self, why: str) -> None:
        if self._ledger is not None:
            self._unwritten = self._ledger.close(why)
        self._slot = self._ledger = None
