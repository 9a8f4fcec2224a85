"""Base of the progress bars: a thread draws them and reads counters, so the training loop does no work for them."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.callbacks._progress_thread import DRAWING, ProgressThread, Snapshot
from drivetrain.errors import ConfigurationError
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None}  # a thread stays where it runs

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
    def total_train_batches(self) -> int | float:
        """Batches of a training epoch; ``inf`` where the loader has no length; 0 outside of a run."""
        return 0 if self._thread is None else self._thread._trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of a validation, over all loaders; 0 outside of a run."""
        return 0 if self._thread is None else sum(self._thread._trainer.num_val_batches)

    def enable(self) -> None:
        """Draw again; a run that began without a bar gets one when its next epoch or evaluation begins."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing more."""
        self._enabled = False

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float]:
        """What to show beside the bar. An override runs in the bar's thread: read plain numbers there, no tensors."""
        return dict(trainer.progress_bar_metrics)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` that leaves the bar intact, with the arguments of the built-in."""
        with DRAWING:
            print(*args, **kwargs)

    def draw(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``. Two threads call this, never at the same time."""

    def close(self) -> None:
        """The run is over: leave the terminal in order. Called after the last :meth:`draw`."""

    # ---- hooks: a few per epoch, none per batch ------------------------------------------------------------------

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

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the thread."""
        self._stop()

    # ---- how it works --------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> ProgressThread | None:
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


def default_progress_bar() -> ProgressBar:
    """The bar that suits where standard output goes: drawn in a terminal or a notebook, lines of text elsewhere."""
    notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if (notebook or terminal) and importlib.util.find_spec("rich") is not None:
        from drivetrain.callbacks.rich_progress import RichProgressBar

        return RichProgressBar()
    from drivetrain.callbacks.plain_progress import PlainProgressBar

    return PlainProgressBar()
