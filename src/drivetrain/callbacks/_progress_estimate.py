"""The estimates that a progress bar shows: the rate of batches, how much of a fit is left, and the share of time in
which the fit waits for data.
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
"""How often :meth:`Waiting.look` must have been called before the share of waiting is shown."""


class Meter:
    """Measures batches per second over the last 20 calls of :meth:`measure` with a new number of batches."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=21)
        self._rate = 0.0

    def restart(self, count: int) -> None:
        """Start the measurement at this moment; earlier time does not count for the rate."""
        self._samples.clear()
        self._samples.append((time.monotonic(), count))

    def measure(self, count: int) -> float:
        """Return the current rate, or the last known rate while no batch has been counted since :meth:`restart`."""
        now_s = time.monotonic()
        if count < self._samples[-1][1]:  # the loop has reset its counter since the stage began
            begin_s = self._samples[0][0]
            self._samples.clear()
            self._samples.append((begin_s, 0))
        if count > self._samples[-1][1]:
            self._samples.append((now_s, count))
        (begin_s, first), (end_s, last) = self._samples[0], self._samples[-1]
        if last > first and end_s > begin_s:
            mean_s = (end_s - begin_s) / (last - first)
            # so the rate falls while a batch takes longer than the mean
            self._rate = (last - first) / (max(end_s, now_s - mean_s) - begin_s)
        return self._rate


class Waiting:
    """Estimates the share of time in which a loop waits for a batch, from the last 240 calls of :meth:`look`."""

    def __init__(self) -> None:
        self._looks: deque[bool] = deque(maxlen=240)

    def look(self, phase: int) -> None:
        """Record whether the loop, which is in ``phase``, waits for a batch at this moment."""
        self._looks.append(phase in _FETCHES)

    @property
    def share(self) -> float | None:
        """The share, from 0 to 1; ``None`` until :meth:`look` was called often enough."""
        return sum(self._looks) / len(self._looks) if len(self._looks) >= _FEWEST else None


class Rest:
    """Estimates how many batches and how many seconds of a fit are left.

    Args:
        trainer: the Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first: int | None = None  # the number of batches that were done when the training began
        # the time and the number of batches when a new batch was first seen
        self._from: tuple[float, int] | None = None

    def batches(self) -> float:
        """Return the number of batches until ``max_epochs`` or ``max_steps`` is reached; ``inf`` without a limit."""
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
            rate: batches per second; used until the mean rate of the fit is known.
        """
        now_s, done = time.monotonic(), self._trainer.progress.total_batches
        if self._first is None:
            self._first = done
        if self._from is None and done > self._first:  # leave out the first batch, which takes longer than others
            self._from = now_s, done
        needed_s = left / rate if rate else math.inf
        if self._from is not None and done > self._from[1]:
            needed_s = left * (now_s - self._from[0]) / (done - self._from[1])
        timers = [each.time_remaining() for each in self._trainer.callbacks if isinstance(each, Timer)]
        needed_s = min([needed_s, *(max(each, 0) for each in timers if each is not None)])
        return None if needed_s == math.inf else needed_s


def _batches(steps: int, done: int, size: float, window: int) -> float:
    """Return how many batches the next ``steps`` optimizer steps take, if ``done`` batches of an epoch of ``size``
    batches are done.
    """
    # the number of steps until the epoch's end
    rest = math.ceil((size - done) / window) if size < math.inf else math.inf
    if steps <= rest:
        return min(steps * window - done % window if steps else 0, size - done)
    epochs, more = divmod(steps - int(rest), math.ceil(size / window))
    return size - done + epochs * size + min(more * window, size)
