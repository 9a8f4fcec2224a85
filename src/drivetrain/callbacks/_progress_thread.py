"""Draw a progress bar at intervals, in a thread that reads the run's counters."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drivetrain.base.files import encodable
from drivetrain.callback import Trainer
from drivetrain.callbacks._progress_estimate import Meter, Rest, Waiting
from drivetrain.loops.progress import RunningStage

# [Note: fork while a bar is drawn]
# DataLoader workers are forked from the main thread. If a fork happened while the bar's thread was inside print(), the
# child would inherit a locked stream, and hang at its first print. So a fork waits until the thread is not drawing.
DRAWING = threading.RLock()

_LOSS_EACH_S = 2.0
"""The minimum number of seconds between two readings of the loss, because a reading waits for the device."""

TITLES = {
    "sanity_check": "Sanity check", "train": "Epoch", "validate": "Validation", "test": "Test", "predict": "Prediction",
}  # fmt: skip
"""The name of each stage."""


@dataclass(frozen=True)
class Snapshot:
    """The values that a bar shows at one moment.

    Attributes:
        stage: "train", "sanity_check", "validate", "test" or "predict".
        epoch: the index of the epoch, from 0.
        max_epochs: the number of epochs of the fit; ``None`` if it is unknown.
        batch: the number of finished batches in this epoch or evaluation.
        num_batches: the number of batches of this epoch or evaluation, or fewer if ``max_steps`` ends the fit earlier;
            ``None`` if it is unknown.
        rate: the recent number of batches per second.
        metrics: the values for the bar.
        final: whether the epoch or the evaluation has ended. The bar is drawn exactly once at the end.
        transient: whether the bar is removed at the end, as for an evaluation inside training.
        description: the name that a subclass gives to the stage; "" for the default name.
        step: the number of optimizer steps of the fit.
        left_s: seconds until this epoch or evaluation ends; ``None`` if it is unknown.
        fit_left_s: seconds until the fit ends, including validation; ``None`` if it is unknown.
        waiting: the share of the last minute that the loop waited for data; ``None`` if it is unknown.
    """

    stage: str
    epoch: int
    max_epochs: int | None
    batch: int
    num_batches: int | None
    rate: float = 0.0
    metrics: dict[str, int | str | float] = field(default_factory=dict)
    final: bool = False
    transient: bool = False
    description: str = ""
    step: int = 0
    left_s: float | None = None
    fit_left_s: float | None = None
    waiting: float | None = None

    @property
    def is_training(self) -> bool:
        """Whether this is a snapshot of a training epoch."""
        return self.stage == RunningStage.TRAINING.value

    @property
    def title(self) -> str:
        """The name of the stage; in training, followed by :attr:`epoch_text`."""
        name = self.description or TITLES[self.stage]
        return f"{name} {self.epoch_text}" if self.is_training else name

    @property
    def epoch_text(self) -> str:
        """The epoch, counted from 1, and the number of epochs, such as "1/10"."""
        return f"{self.epoch + 1}" + ("" if self.max_epochs is None else f"/{self.max_epochs}")

    @property
    def count_text(self) -> str:
        """The number of finished batches, and the number of all batches, such as "3/100"."""
        return str(self.batch) if self.num_batches is None else f"{self.batch}/{self.num_batches}"

    @property
    def rate_text(self) -> str:
        """The rate with its unit. A rate below 1 has more digits."""
        return f"{self.rate:.1f} it/s" if self.rate >= 1 else f"{self.rate:.3f} it/s"

    @property
    def left_text(self) -> str:
        """The remaining time of the epoch, and, before the last epoch, the remaining time of the fit."""
        left = "" if self.left_s is None or self.final else duration_text(self.left_s)
        if not self.fit_left_text:
            return left and f"{left} left"
        return "left: " + ", ".join([*([f"epoch {left}"] if left else []), self.fit_left_text])

    @property
    def fit_left_text(self) -> str:
        """The remaining time of the fit; "" in the last epoch."""
        last = not self.is_training or self.epoch + 1 == self.max_epochs
        return "" if last or (self.fit_left_s or 0) < 0.5 else f"fit {duration_text(self.fit_left_s or 0)}"

    @property
    def waiting_text(self) -> str:
        """The share of time that the loop waits for data; "" below 5 %."""
        return f"waits for data {self.waiting:.0%}" if self.waiting is not None and self.waiting >= 0.05 else ""

    @property
    def texts(self) -> list[str]:
        """The texts to show beside the title, without the metrics."""
        found = (f"{self.count_text} batches", self.rate_text, self.left_text, self.waiting_text)
        return [each for each in found if each]

    @property
    def metrics_text(self) -> str:
        """The metrics in one line. Floats have four digits."""
        return ", ".join(self.texts_of_metrics())

    def texts_of_metrics(self, spec: str = ".4g") -> list[str]:
        """Return a text for each metric. ``spec`` is the format of floats."""
        values = {k: format(value, spec) if isinstance(value, float) else value for k, value in self.metrics.items()}
        return [encodable(f"{name}={value}") for name, value in values.items()]


def duration_text(seconds: float) -> str:
    """Return a duration in at most two units: "15s", "4m02s", "3h05m", "2d04h"."""
    seconds = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))
    for size, name, lesser, its_name in units:
        if seconds >= size:
            return f"{seconds // size}{name}{seconds % size // lesser:02}{its_name}"
    return f"{seconds}s"


def lay_out(texts: Sequence[str], width: int, lines: int = 1, delimiter: str = ", ") -> list[str]:
    """Return ``texts``, arranged in at most ``lines`` lines of ``width`` columns. No text is split between two lines.

    If some texts do not fit, the last line ends with their number, such as "+3". If a text is wider than a line, the
    name before the ``=`` is shortened.
    """
    for shown in range(len(texts), -1, -1):
        left_out = [f"+{len(texts) - shown}"] if shown < len(texts) else []
        rows: list[str] = []
        for text in [*(_shortened(each, width) for each in texts[:shown]), *left_out]:
            if rows and len(rows[-1]) + len(delimiter) + len(text) <= width:
                rows[-1] += delimiter + text
            else:
                rows.append(text)
        if len(rows) <= lines and all(len(row) <= width for row in rows):
            return rows
    return []


def _shortened(text: str, width: int) -> str:
    name, equals, value = text.rpartition("=")
    room = width - len(value) - len("..=")
    return text if len(text) <= width or not equals or room < 1 else f"{name[:room]}..={value}"


class ProgressThread(threading.Thread):
    """Calls ``draw`` with a snapshot every ``tick_s`` seconds while a stage is running.

    The main thread calls :meth:`enter` and :meth:`exit` to set the running stage. The progress thread reads the
    counters of that stage.

    Attributes:
        error: the exception that ``draw`` raised. After an exception, ``draw`` is not called again.
    """

    def __init__(self, trainer: Trainer, draw: Callable[[Snapshot], None], tick_s: float) -> None:
        super().__init__(name="drivetrain-progress", daemon=True)
        self.error: Exception | None = None
        self._drawing = False
        self._trainer = trainer
        self._draw = draw
        self._tick_s = tick_s
        self._stopped = threading.Event()
        # the running stages, the innermost last
        self._stages: list[RunningStage] = []
        self._meters: dict[RunningStage, Meter] = {}
        self._rest, self._waiting = Rest(trainer), Waiting()
        self._loss_due_s = 0.0  # the time at which the loop should read the next loss
        _hold_forks_while_drawing()

    def run(self) -> None:
        while self.error is None and not self._stopped.wait(self._tick_s):
            with DRAWING:
                if self._stages:
                    self._waiting.look(self._trainer.progress.slot[0])
                    self._ask_for_loss()
                    self.show(self.snapshot())

    def _ask_for_loss(self) -> None:
        """Ask the training loop to read its loss, if no value was logged for the bar."""
        now_s = time.monotonic()
        trains = self._stages[-1] is RunningStage.TRAINING
        if trains and now_s >= self._loss_due_s and not self._trainer.logbook.bar_metrics:
            self._trainer.progress.want_loss()
            self._loss_due_s = now_s + _LOSS_EACH_S

    def stop(self) -> None:
        """Tell the thread to end, and wait until it has ended."""
        self._stopped.set()
        if self.is_alive():
            self.join()

    def show(self, snapshot: Snapshot) -> None:
        """Draw ``snapshot`` now. Any thread can call this method."""
        with DRAWING:
            if self.error is not None or self._drawing:  # an override of draw() may call show() again
                return
            self._drawing = True
            try:
                self._draw(snapshot)
            except Exception as error:  # an exception while drawing must not end the run
                self.error = error
            finally:
                self._drawing = False

    def show_now(self, training: bool) -> None:
        """Draw the bar of training now, or with ``training=False`` the bar of the running evaluation."""
        with DRAWING:
            for stage in self._stages:
                if (stage is RunningStage.TRAINING) == training:
                    self.show(self.snapshot(stage=stage))

    def enter(self, stage: RunningStage) -> None:
        """Begin ``stage``: training, or an evaluation inside the running stage."""
        with DRAWING:
            if self._stages:
                self.snapshot()  # the rate of the outer stage must not include the time of the new stage
            self._stages = [*(self._stages if stage is not RunningStage.TRAINING else ()), stage]
            self._ask_for_loss()
            # an evaluation counts from 0, because the loop has not yet reset the counters of the previous evaluation
            training = stage is RunningStage.TRAINING
            self._meters.setdefault(stage, Meter()).restart(self._counts(stage)[0] if training else 0)

    def exit(self) -> Snapshot | None:
        """End the innermost stage. Return its last snapshot, or ``None`` if no stage is running."""
        with DRAWING:
            if not self._stages:
                return None
            snapshot = self.snapshot(final=True)
            self._stages.pop()
            if self._stages:
                outer = self._stages[-1]
                self._meters[outer].restart(self._counts(outer)[0])
            return snapshot

    def snapshot(self, final: bool = False, stage: RunningStage | None = None) -> Snapshot:
        """Return a snapshot of ``stage``, or of the innermost stage if ``stage`` is ``None``."""
        stage = stage or self._stages[-1]
        batch, total = self._counts(stage, final)
        progress, max_epochs = self._trainer.progress, self._trainer.max_epochs
        rate, training = self._meters[stage].measure(batch), stage is RunningStage.TRAINING
        fit_left_s = None
        if RunningStage.TRAINING in self._stages:
            done, size = self._counts(RunningStage.TRAINING)
            left = self._rest.batches()
            if left < math.inf and 0 < size < math.inf:
                max_epochs = progress.current_epoch + max(math.ceil((done + left) / size), 1)
            if training:
                fit_left_s, total = self._rest.seconds(left, rate), min(total, done + left)
        left_s = (total - batch) / rate if rate and total < math.inf else None
        return Snapshot(
            stage=stage.value,
            epoch=progress.current_epoch,
            max_epochs=None if max_epochs is None or max_epochs < 0 else max_epochs,
            batch=batch,
            num_batches=None if total == math.inf else int(total),
            rate=rate,
            final=final,
            transient=stage is not self._stages[0] or stage is RunningStage.SANITY_CHECKING,
            step=progress.global_step,
            left_s=left_s if fit_left_s is None or left_s is None else min(left_s, fit_left_s),
            fit_left_s=fit_left_s,
            waiting=self._waiting.share,
        )

    def _counts(self, stage: RunningStage, final: bool = False) -> tuple[int, float]:
        progress = self._trainer.progress
        if stage is RunningStage.TRAINING:
            return progress.batches_done, progress.num_training_batches
        # eval_batch_idx does not count the current batch
        return max(progress.eval_batch_idx + final, 0), progress.num_eval_batches


@functools.cache
def _hold_forks_while_drawing() -> None:
    """Make each fork wait until the thread has finished drawing: see [Note: fork while a bar is drawn]."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(before=DRAWING.acquire, after_in_parent=DRAWING.release, after_in_child=DRAWING.release)
