"""The base class of the progress bars. A thread reads the run's counters and draws the bar, so the training loop has no
extra work.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.callbacks._progress_thread import DRAWING, TITLES, ProgressThread, Snapshot
from drivetrain.errors import WrongTypeError, wrong_value
from drivetrain.loops.progress import RunningStage, TrainerFn

with on_first_use:
    from drivetrain.base import notebook
    from drivetrain.callbacks import _fit_summary, notebook_progress, plain_progress, rich_progress

__all__ = ["ProgressBar", "Snapshot", "default_progress_bar"]


def _title_of(stage: str, doc: str) -> Any:
    """Return a property whose value is the displayed name of ``stage``."""
    return property(lambda bar: TITLES[stage], doc=doc)


class ProgressBar(Callback):
    """Base class of the progress bars; a subclass shows a :class:`Snapshot` in :meth:`draw`.

    The bar has no hook inside an epoch, so a step has no extra work. A thread wakes every ``tick_s`` seconds and reads
    counters and metrics. The thread never waits for the device, so the displayed values can be slightly old. If no
    value is logged for the bar, the loop reads the loss from the device every 2 seconds. The main thread draws the end
    of each epoch and each evaluation. If drawing fails, the bar is switched off with a warning and the run continues.

    Args:
        refresh_rate: the minimum number of batches between two updates; 0 turns the bar off.
        leave: keep the bar of each finished epoch on the screen.

    Raises:
        ConfigurationError: ``refresh_rate`` is negative.
    """

    tick_s: float = 0.25
    """The number of seconds between two readings of the counters."""

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise wrong_value(type(self).__name__, "refresh_rate", refresh_rate, "0 or more batches", "refresh_rate=1")
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._enabled = True
        self._began_s = time.monotonic()
        self._thread: ProgressThread | None = None
        self._ended_epoch: Snapshot | None = None
        self._drawn: tuple[str, int] | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._dataloader_idx: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None, "_trainer": None}  # a thread cannot be pickled

    # ---- for users and subclasses --------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is drawn."""
        return not self.is_enabled

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run.

        Raises:
            ConfigurationError: there is no run.
        """
        found = None if self._trainer is None else self._trainer()
        if found is None:
            raise WrongTypeError(
                f"{type(self).__name__} has no Trainer now. Pass it in callbacks, and read .trainer during a run."
            )
        return found

    @property
    def total_train_batches(self) -> int | float:
        """The number of batches of a training epoch: ``inf`` if the loader has no length, 0 outside a run."""
        return 0 if self._trainer is None else self.trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """The number of validation batches of all loaders; 0 outside a run, or if this epoch has no validation."""
        if self._trainer is None:
            return 0
        every = self.trainer.check_val_every_n_epoch if self.trainer.state.fn == TrainerFn.FITTING else None
        skips = every is not None and (self.trainer.current_epoch + 1) % every
        return 0 if skips else sum(self.trainer.num_val_batches)

    @property
    def total_test_batches(self) -> int | float:
        """The number of test batches of all loaders; 0 outside a run."""
        return 0 if self._trainer is None else sum(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> int | float:
        """The number of prediction batches of all loaders; 0 outside a run."""
        return 0 if self._trainer is None else sum(self.trainer.num_predict_batches)

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """The number of validation batches of the current loader. During the sanity check, only the batches of the
        sanity check count.
        """
        sanity = self.trainer.sanity_checking
        return self._of_loader(self.trainer.num_sanity_val_batches if sanity else self.trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """The number of test batches of the current loader."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """The number of prediction batches of the current loader."""
        return self._of_loader(self.trainer.num_predict_batches)

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether ``dataloader_idx`` has changed since the last call. Make this loader the current loader."""
        before, self._dataloader_idx = self._dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the current loader."""
        self._dataloader_idx = None

    def _of_loader(self, counts: list[float]) -> int | float:
        return counts[self._dataloader_idx or 0] if counts else 0

    # A subclass may override these properties to change the text.

    sanity_check_description = _title_of("sanity_check", "The name of the sanity check.")
    train_description = _title_of("train", "The name of an epoch, before the epoch's number.")
    validation_description = _title_of("validate", "The name of a validation.")
    test_description = _title_of("test", "The name of a test.")
    predict_description = _title_of("predict", "The name of a prediction.")

    def enable(self) -> None:
        """Draw the bar again after :meth:`disable`. If the run began without a bar, the bar appears at the next epoch
        or evaluation.
        """
        self._enabled = True

    def disable(self) -> None:
        """Stop drawing."""
        self._enabled = False

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float]:
        """Return the values to show beside the bar: by default, the values that were logged with ``prog_bar=True``.

        If a subclass overrides this method, the base method also returns the run's version, as ``v_num``. The bar's
        thread calls the override, so the override should not read tensors.
        """
        metrics: dict[str, int | str | float] = {**trainer.logbook.bar_metrics}
        if type(self).get_metrics is ProgressBar.get_metrics or (logger := trainer.logger) is None:
            return metrics
        version = None if logger.is_undecided else logger.version
        return metrics if version is None else {"v_num": version, **metrics}

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line without damaging the bar. The arguments are the arguments of the built-in ``print``."""
        with DRAWING:
            print(*args, **kwargs)

    def draw(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``. The bar's thread and the main thread both call this method, but never at once."""

    def close(self) -> None:
        """Restore the terminal. The bar calls this method after the last :meth:`draw`."""

    # ---- hooks: a few per epoch, none per batch ------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Store the Trainer."""
        self._trainer = weakref.ref(trainer)
        self._began_s = time.monotonic()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the thread."""
        self._start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show a new epoch, or an epoch that is resumed in its middle."""
        self._enter(trainer, pl_module, RunningStage.TRAINING)

    on_train_epoch_start = on_train_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the counters of the epoch. The next hook draws the bar, because the epoch's metrics are reduced only
        after all ``on_train_epoch_end`` hooks.
        """
        if self._thread is not None:
            self._ended_epoch = self._thread.exit()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the end of the last epoch, without the remaining time of the fit."""
        if self._ended_epoch is not None:
            self._ended_epoch = replace(self._ended_epoch, fit_left_s=None)
        self._draw_ended_epoch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the validation, or the sanity check."""
        sanity = trainer.sanity_checking
        self._enter(trainer, pl_module, RunningStage.SANITY_CHECKING if sanity else RunningStage.VALIDATING)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the test."""
        self._enter(trainer, pl_module, RunningStage.TESTING)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the prediction."""
        self._enter(trainer, pl_module, RunningStage.PREDICTING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the end of an evaluation."""
        if self._thread is not None and (snapshot := self._thread.exit()) is not None:
            self._thread.show(snapshot)
        self._report()

    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the thread, and log a summary of a fit."""
        fits = trainer.progress.fn is TrainerFn.FITTING and self._thread is not None
        self._stop()
        self._trainer = None
        for line in _fit_summary.summary(trainer, time.monotonic() - self._began_s) if fits else ():
            rank_zero_info(line)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the thread."""
        self._stop()
        self._trainer = None

    # ---- implementation ------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> ProgressThread | None:
        self._trainer = weakref.ref(trainer)  # a subclass's setup() may forget to call super()
        if self._thread is None and self.is_enabled and trainer.is_global_zero:
            self._thread = ProgressThread(trainer, partial(self._draw_if_due, trainer, pl_module), self.tick_s)
            self._thread.start()
        return self._thread

    def _enter(self, trainer: Trainer, pl_module: LightningModule, stage: RunningStage) -> None:
        if (thread := self._start(trainer, pl_module)) is not None:
            self._draw_ended_epoch()
            thread.enter(stage)

    def _draw_unread(self, training: bool) -> None:
        """Draw a bar now, because user code reads the bar object. ``training`` chooses between the bars of training and
        evaluation.
        """
        if self._thread is not None:
            if training and self._ended_epoch is not None:
                self._thread.show(self._ended_epoch)
            else:
                self._thread.show_now(training)

    def _draw_ended_epoch(self) -> None:
        snapshot, self._ended_epoch = self._ended_epoch, None
        if self._thread is not None and snapshot is not None:
            self._thread.show(snapshot)
        self._report()

    def _draw_if_due(self, trainer: Trainer, pl_module: LightningModule, snapshot: Snapshot) -> None:
        if not self.is_enabled:
            return
        snapshot = replace(snapshot, description=getattr(self, _DESCRIPTIONS[snapshot.stage]))
        title, batch = self._drawn or ("", 0)
        if snapshot.final or title != snapshot.title or not 0 <= snapshot.batch - batch < self.refresh_rate:
            metrics = self.get_metrics(trainer, pl_module)
            if snapshot.is_training and not trainer.logbook.bar_metrics and trainer.progress.loss is not None:
                metrics = {"loss": trainer.progress.loss, **metrics}
            self.draw(replace(snapshot, metrics=metrics))
            self._drawn = snapshot.title, snapshot.batch

    def _report(self) -> None:
        """Warn once if drawing has failed. Only the main thread calls this method."""
        if self._thread is not None and self._thread.error is not None and self._enabled:
            self.disable()
            error = self._thread.error
            rank_zero_warn(
                f"{type(self).__name__} could not draw and is switched off; the run continues. It failed with "
                f"{type(error).__name__}: {error}. Pass enable_progress_bar=False, or another bar in callbacks."
            )

    def _stop(self) -> None:
        if (thread := self._thread) is None:
            return
        thread.stop()
        try:
            self._draw_ended_epoch()
        finally:
            self._thread = self._drawn = None  # drop the thread, which refers to the Trainer and the module
            try:
                self.close()
            except Exception:  # a lost terminal must not make a finished run fail
                self.disable()


_DESCRIPTIONS = {
    "sanity_check": "sanity_check_description", "train": "train_description", "validate": "validation_description",
    "test": "test_description", "predict": "predict_description",
}  # fmt: skip
"""For each stage, the property that returns its name."""


def default_progress_bar() -> ProgressBar:
    """Return the bar for this process. In a notebook or a terminal, the bar is drawn. Elsewhere, the bar prints lines
    of text.
    """
    if notebook.can_display():
        return notebook_progress.NotebookProgressBar()
    terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if terminal and importlib.util.find_spec("rich") is not None:
        return rich_progress.RichProgressBar()

    return plain_progress.PlainProgressBar()
