"""Base of the progress bars: a thread draws them and reads counters, so the training loop does no work for them."""

from __future__ import annotations

import importlib.util
import os
import sys
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.callbacks._progress_thread import DRAWING, ProgressThread, Snapshot
from drivetrain.errors import ConfigurationError, WrongTypeError
from drivetrain.loops.progress import RunningStage

if TYPE_CHECKING:
    from drivetrain.module.module import LightningModule
    from drivetrain.trainer.trainer import Trainer

__all__ = ["ProgressBar", "Snapshot", "default_progress_bar"]


class ProgressBar(Callback):
    """Base of the progress bars; a subclass shows a :class:`Snapshot` in :meth:`draw`.

    It has no hook inside an epoch. A thread wakes every ``tick_s`` seconds and reads counters and the floats of the
    last flush, never a tensor; so the display may be slightly late. The end of each epoch and of each evaluation
    is drawn by the main thread, however short it was. If drawing fails, the bar is switched off with a warning and
    the run continues.

    Args:
        refresh_rate: how many batches must have passed for the thread to draw again; 0 switches the bar off.
        leave: keep each finished epoch's bar on the screen instead of reusing it.

    Raises:
        ConfigurationError: ``refresh_rate`` is negative.
    """

    tick_s: float = 0.25
    """How often the thread looks, in seconds."""

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise ConfigurationError(
                f"{type(self).__name__} got refresh_rate={refresh_rate}. Pass a number of batches, or 0 for no bar."
            )
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._enabled = True
        self._thread: ProgressThread | None = None
        self._ended_epoch: Snapshot | None = None
        self._drawn: tuple[str, int] | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._dataloader_idx: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None, "_trainer": None}  # a thread stays where it runs

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
        """Batches of a training epoch; ``inf`` where the loader has no length; 0 outside of a run."""
        return 0 if self._trainer is None else self.trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of a validation, over all loaders; 0 outside of a run."""
        return 0 if self._trainer is None else sum(self.trainer.num_val_batches)

    @property
    def total_test_batches(self) -> int | float:
        """Batches of a test, over all loaders; 0 outside of a run."""
        return 0 if self._trainer is None else sum(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> int | float:
        """Batches of a prediction, over all loaders; 0 outside of a run."""
        return 0 if self._trainer is None else sum(self.trainer.num_predict_batches)

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of a validation, or of the sanity check while it runs, of the loader in use."""
        sanity = self.trainer.sanity_checking
        return self._of_loader(self.trainer.num_sanity_val_batches if sanity else self.trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of a test, of the loader in use."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of a prediction, of the loader in use."""
        return self._of_loader(self.trainer.num_predict_batches)

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether this loader is another one than at the last call; it is the loader in use from now on."""
        before, self._dataloader_idx = self._dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which loader was in use."""
        self._dataloader_idx = None

    def _of_loader(self, counts: list[float]) -> int | float:
        return counts[self._dataloader_idx or 0] if counts else 0

    # What a subclass overrides here is shown instead of the usual words.

    @property
    def sanity_check_description(self) -> str:
        """What the sanity check is called."""
        return "Sanity check"

    @property
    def train_description(self) -> str:
        """What an epoch is called; its number follows."""
        return "Epoch"

    @property
    def validation_description(self) -> str:
        """What a validation is called."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """What a test is called."""
        return "Test"

    @property
    def predict_description(self) -> str:
        """What a prediction is called."""
        return "Prediction"

    def enable(self) -> None:
        """Draw again; a run that began without a bar gets one when its next epoch or evaluation begins."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing more."""
        self._enabled = False

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float]:
        """Return what to show beside the bar: the values logged with ``prog_bar=True``.

        A subclass that overrides it gets the run's version too, as ``v_num``, which it may remove. An override runs in
        the bar's thread: read plain numbers there, no tensors.
        """
        own = type(self).get_metrics is not ProgressBar.get_metrics
        return {**(_version_of(trainer) if own else {}), **trainer.progress_bar_metrics}

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` that leaves the bar intact, with the arguments of the built-in."""
        with DRAWING:
            print(*args, **kwargs)

    def draw(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``. Two threads call this, never at the same time."""

    def close(self) -> None:
        """The run is over: leave the terminal in order. Called after the last :meth:`draw`."""

    # ---- hooks: a few per epoch, none per batch ------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the Trainer."""
        self._trainer = weakref.ref(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the thread."""
        self._start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the thread; an epoch that is resumed in its middle begins here."""
        self._enter(trainer, pl_module, RunningStage.TRAINING)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show a new epoch."""
        self._enter(trainer, pl_module, RunningStage.TRAINING)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the epoch's counts. Its metrics are flushed after all of these hooks, so it is drawn a hook later."""
        if self._thread is not None:
            self._ended_epoch = self._thread.exit()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the end of the last epoch."""
        self._draw_ended_epoch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the validation, or the sanity check."""
        sanity = trainer.sanity_checking
        self._enter(trainer, pl_module, RunningStage.SANITY_CHECKING if sanity else RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show its end."""
        self._exit()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the test."""
        self._enter(trainer, pl_module, RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show its end."""
        self._exit()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the prediction."""
        self._enter(trainer, pl_module, RunningStage.PREDICTING)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show its end."""
        self._exit()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the thread."""
        self._stop()
        self._trainer = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the thread."""
        self._stop()
        self._trainer = None

    # ---- how it works --------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> ProgressThread | None:
        self._trainer = weakref.ref(trainer)  # again, for a subclass whose setup() does not call this one's
        if self._thread is None and self.is_enabled and trainer.is_global_zero:
            self._thread = ProgressThread(trainer, partial(self._draw_if_due, trainer, pl_module), self.tick_s)
            self._thread.start()
        return self._thread

    def _enter(self, trainer: Trainer, pl_module: LightningModule, stage: RunningStage) -> None:
        if (thread := self._start(trainer, pl_module)) is not None:
            self._draw_ended_epoch()
            thread.enter(stage)

    def _exit(self) -> None:
        if self._thread is not None and (snapshot := self._thread.exit()) is not None:
            self._thread.show(snapshot)
        self._report()

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
            self.draw(replace(snapshot, metrics=self.get_metrics(trainer, pl_module)))
            self._drawn = snapshot.title, snapshot.batch

    def _report(self) -> None:
        """Warn once, from the main thread, that drawing failed."""
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
            self._thread = self._drawn = None  # the trainer and the module are let go with the thread
            try:
                self.close()
            except Exception:  # a terminal that is gone must not turn a finished run into a failed one
                self.disable()


_DESCRIPTIONS = {
    "sanity_check": "sanity_check_description", "train": "train_description", "validate": "validation_description",
    "test": "test_description", "predict": "predict_description",
}  # fmt: skip
"""Stage -> the property that says what it is called."""


def _version_of(trainer: Trainer) -> dict[str, int | str | float]:
    logger = trainer.logger
    if logger is None or getattr(logger, "is_undecided", False) or logger.version is None:
        return {}
    return {"v_num": logger.version}


def default_progress_bar() -> ProgressBar:
    """The bar that suits where standard output goes: drawn in a terminal or a notebook, lines of text elsewhere."""
    notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
    terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if (notebook or terminal) and importlib.util.find_spec("rich") is not None:
        from drivetrain.callbacks.rich_progress import RichProgressBar

        return RichProgressBar()
    from drivetrain.callbacks.plain_progress import PlainProgressBar

    return PlainProgressBar()
