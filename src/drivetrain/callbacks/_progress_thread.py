"""The thread of a progress bar: its snapshots, when the thread draws them, and the rate."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain.base.files import encodable
from drivetrain.loops.progress import RunningStage

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

# [Note: fork while a bar is drawn]
# DataLoader workers are forked from the main thread. If the bar's thread were inside print() at that moment, the child
# would inherit the locked stream and hang at its first print. So a fork waits until nothing is being drawn.
DRAWING = threading.RLock()

_TITLES = {"sanity_check": "Sanity check", "validate": "Validation", "test": "Test", "predict": "Prediction"}


@dataclass(frozen=True)
class Snapshot:
    """The content of a bar at one time.

    Attributes:
        stage: "train", "sanity_check", "validate", "test" or "predict".
        epoch: index from 0.
        max_epochs: the maximum number of epochs; ``None`` if it is unlimited.
        batch: number of finished batches in this epoch or evaluation.
        num_batches: their total number; ``None`` if the loader has no length.
        rate: the recent number of batches per second.
        metrics: the values for the bar.
        final: the epoch or the evaluation has ended; each is drawn exactly once with this flag.
        transient: whether this is an evaluation inside training, whose bar is removed afterwards.
        description: a subclass's name for the stage; empty for the default.
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

    @property
    def is_training(self) -> bool:
        """Whether this is a training epoch."""
        return self.stage == RunningStage.TRAINING.value

    @property
    def title(self) -> str:
        """The name of the stage, with the epoch counted from 1."""
        if not self.is_training:
            return self.description or _TITLES[self.stage]
        epochs = f"{self.epoch + 1}" + ("" if self.max_epochs is None else f"/{self.max_epochs}")
        return f"{self.description or 'Epoch'} {epochs}"

    @property
    def count_text(self) -> str:
        """The number of finished batches, and their total."""
        return str(self.batch) if self.num_batches is None else f"{self.batch}/{self.num_batches}"

    @property
    def rate_text(self) -> str:
        """The rate with its unit; low rates keep more digits."""
        return f"{self.rate:.1f} it/s" if self.rate >= 1 else f"{self.rate:.3f} it/s"

    @property
    def metrics_text(self) -> str:
        """The metrics in one line, floats with four digits."""
        return self.text_of_metrics(".4g", ", ")

    def text_of_metrics(self, spec: str, delimiter: str) -> str:
        """Return the metrics in one line, floats formatted with ``spec``."""
        values = {k: format(value, spec) if isinstance(value, float) else value for k, value in self.metrics.items()}
        return encodable(delimiter.join(f"{name}={value}" for name, value in values.items()))


class ProgressThread(threading.Thread):
    """Calls ``draw`` with a snapshot every ``tick_s`` seconds while a stage runs, from the start of a run to its end.

    The main thread sets the running stage; the thread reads the counters itself.

    Attributes:
        error: an exception of ``draw``, which is then not called again.
    """

    def __init__(self, trainer: Trainer, draw: Callable[[Snapshot], None], tick_s: float) -> None:
        super().__init__(name="drivetrain-progress", daemon=True)
        self.error: Exception | None = None
        self._drawing = False
        self._trainer = trainer
        self._draw = draw
        self._tick_s = tick_s
        self._stopped = threading.Event()
        self._stages: list[RunningStage] = []  # the innermost last; without a stage, nothing is drawn
        self._meters: dict[RunningStage, _Meter] = {}
        _hold_forks_while_drawing()

    def run(self) -> None:
        """Draw at intervals."""
        while self.error is None and not self._stopped.wait(self._tick_s):
            with DRAWING:
                if self._stages:
                    self.show(self.snapshot())

    def stop(self) -> None:
        """End immediately; returns when the thread has ended."""
        self._stopped.set()
        if self.is_alive():
            self.join()

    def show(self, snapshot: Snapshot) -> None:
        """Draw ``snapshot`` now; any thread may call it."""
        with DRAWING:
            if self.error is not None or self._drawing:  # what is drawn may read the bar
                return
            self._drawing = True
            try:
                self._draw(snapshot)
            except Exception as error:  # an exception while drawing must not end the run
                self.error = error
            finally:
                self._drawing = False

    def show_now(self, training: bool) -> None:
        """Draw training now if it runs, or with ``training=False`` a running evaluation."""
        with DRAWING:
            for stage in self._stages:
                if (stage is RunningStage.TRAINING) == training:
                    self.show(self.snapshot(stage=stage))

    def enter(self, stage: RunningStage) -> None:
        """Begin ``stage``: training, or an evaluation inside the running stage."""
        with DRAWING:
            if self._stages:
                self.snapshot()  # measures the rate before the time of another stage passes
            self._stages = [*(self._stages if stage is not RunningStage.TRAINING else ()), stage]
            training = stage is RunningStage.TRAINING  # an evaluation's counters still belong to the previous one
            self._meters.setdefault(stage, _Meter()).restart(self._counts(stage)[0] if training else 0)

    def exit(self) -> Snapshot | None:
        """End the innermost stage; return its last snapshot, or ``None`` if none was entered."""
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
        """Return a snapshot of ``stage``; ``None``: of the innermost stage."""
        stage = stage or self._stages[-1]
        batch, total = self._counts(stage, final)
        max_epochs = self._trainer.max_epochs
        return Snapshot(
            stage=stage.value,
            epoch=self._trainer.progress.current_epoch,
            max_epochs=None if max_epochs is None or max_epochs < 0 else max_epochs,
            batch=batch,
            num_batches=None if total == float("inf") else int(total),
            rate=self._meters[stage].measure(batch, final),
            final=final,
            transient=stage is not self._stages[0] or stage is RunningStage.SANITY_CHECKING,
        )

    def _counts(self, stage: RunningStage, final: bool = False) -> tuple[int, float]:
        progress = self._trainer.progress
        if stage is RunningStage.TRAINING:
            return progress.batches_done, progress.num_training_batches
        return max(progress.eval_batch_idx + final, 0), progress.num_eval_batches  # the current batch is not finished


class _Meter:
    """Batches per second over the last 20 ticks."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=21)
        self._rate = 0.0

    def restart(self, count: int) -> None:
        """Restart the measurement: the time until now does not count for the rate."""
        self._samples.clear()
        self._samples.append((time.monotonic(), count))

    def measure(self, count: int, final: bool) -> float:
        """Return the current rate. If no batch was counted since the last call, return the last known rate at the end
        of a stage.
        """
        if count < self._samples[-1][1]:  # the loop has reset its counter since the stage began
            begin_s = self._samples[0][0]
            self._samples.clear()
            self._samples.append((begin_s, 0))
        self._samples.append((time.monotonic(), count))
        (begin_s, first), (end_s, last) = self._samples[0], self._samples[-1]
        if end_s > begin_s and (last > first or not final):
            self._rate = (last - first) / (end_s - begin_s)
        return self._rate


@functools.cache
def _hold_forks_while_drawing() -> None:
    """See [Note: fork while a bar is drawn]."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(before=DRAWING.acquire, after_in_parent=DRAWING.release, after_in_child=DRAWING.release)
