"""Estimate what a progress bar shows: the rate of batches, the time until the fit ends, and the share of time that the
fit waits for data.
"""

from __future__ import annotations

import math
import time
from collections import deque

from drivetrain.callback import Trainer
from drivetrain.callbacks.timer import Timer
from drivetrain.loops.progress import Phase

_FETCHES = (Phase.FETCH, Phase.VALIDATION_FETCH, Phase.TEST_FETCH, Phase.PREDICT_FETCH)
_FEWEST = 20
"""The number of calls of :meth:`Waiting.look` after which :attr:`Waiting.share` has a value."""


class Meter:
    """Measures the number of batches per second from the last 20 changes of the counter of batches."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=21)
        self._rate = 0.0

    def restart(self, count: int) -> None:
        """Forget earlier measurements, and begin again at ``count`` batches."""
        self._samples.clear()
        self._samples.append((time.monotonic(), count))

    def measure(self, count: int) -> float:
        """Return the current rate. Before the first batch after :meth:`restart`, return the last known rate."""
        now_s = time.monotonic()
        if count < self._samples[-1][1]:  # the loop has reset its counter
            begin_s = self._samples[0][0]
            self._samples.clear()
            self._samples.append((begin_s, 0))
        if count > self._samples[-1][1]:
            self._samples.append((now_s, count))
        (begin_s, first), (end_s, last) = self._samples[0], self._samples[-1]
        if last > first and end_s > begin_s:
            mean_s = (end_s - begin_s) / (last - first)
            # the rate falls while the current batch takes longer than the mean
            self._rate = (last - first) / (max(end_s, now_s - mean_s) - begin_s)
        return self._rate


class Waiting:
    """Estimates the share of time in which a loop waits for a batch, from the last 240 calls of :meth:`look`."""

    def __init__(self) -> None:
        self._looks: deque[bool] = deque(maxlen=240)

    def look(self, phase: int) -> None:
        """Record whether the loop is waiting for a batch. ``phase`` is the current :class:`Phase` of the loop."""
        self._looks.append(phase in _FETCHES)

    @property
    def share(self) -> float | None:
        """The share of time in which the loop waits, from 0 to 1; ``None`` after too few calls of :meth:`look`."""
        return sum(self._looks) / len(self._looks) if len(self._looks) >= _FEWEST else None


class Rest:
    """Estimates how many batches and how many seconds of a fit are left.

    Args:
        trainer: the Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first: int | None = None  # the number of trained batches when seconds() was first called
        # when seconds() first saw another batch: the time and the number of batches
        self._from: tuple[float, int] | None = None

    def batches(self) -> float:
        """Return the number of batches until ``max_epochs`` or ``max_steps`` ends the fit; ``inf`` without a limit."""
        limits, progress = self._trainer.limits, self._trainer.progress
        done, size, epochs = progress.batches_done, progress.num_training_batches, limits.max_epochs
        left = math.inf if epochs == math.inf else max((epochs - progress.current_epoch) * size - done, 0)
        if limits.max_steps == math.inf or not size:
            return left
        steps = int(limits.max_steps) - progress.global_step
        if progress.global_step > progress.total_batches:  # several optimizers step in each batch
            steps = math.ceil(steps * progress.total_batches / progress.global_step)
        return min(left, _batches(max(steps, 0), done, size, limits.accumulate))

    def seconds(self, left: float, rate: float) -> float | None:
        """Return the seconds until the fit ends, including validation; ``None`` if it is unknown.

        Args:
            left: the result of :meth:`batches`.
            rate: batches per second; used only while the mean rate of the fit is unknown.
        """
        now_s, done = time.monotonic(), self._trainer.progress.total_batches
        if self._first is None:
            self._first = done
        if self._from is None and done > self._first:  # the first batch takes longer, so it does not count
            self._from = now_s, done
        needed_s = left / rate if rate else math.inf
        if self._from is not None and done > self._from[1]:
            needed_s = left * (now_s - self._from[0]) / (done - self._from[1])
        timers = [each.time_remaining() for each in self._trainer.callbacks if isinstance(each, Timer)]
        needed_s = min([needed_s, *(max(each, 0) for each in timers if each is not None)])
        return None if needed_s == math.inf else needed_s


def _batches(steps: int, done: int, size: float, window: int) -> float:
    """Return how many batches the next ``steps`` optimizer steps take. An optimizer step takes ``window`` batches. Of
    the epoch's ``size`` batches, ``done`` are finished.
    """
    # the number of optimizer steps until the epoch's end
    rest = math.ceil((size - done) / window) if size < math.inf else math.inf
    if steps <= rest:
        return min(steps * window - done % window if steps else 0, size - done)
    epochs, more = divmod(steps - int(rest), math.ceil(size / window))
    return size - done + epochs * size + min(more * window, size)
