"""Logged values that are not numbers, or that no logger gets."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.logbook.logbook import Row
from drivetrain.loops.run import Run


class LogWatch:
    """Checks the values that a run has logged."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._nan_told = False
        self._unlogged: set[str] = set()  # names of per-step values that no logger has received so far

    def logged_nan(self, names: Sequence[str], step: int) -> None:
        if not self._nan_told:
            self._nan_told = True
            rank_zero_warn(
                f"{', '.join(names)}: logged as nan at step {step}. This is said once. If it is the loss, the weights "
                "are, or will be, nan too: Trainer(detect_anomaly=True) names the operation that gave "
                "the first nan. [DT1018]"
            )

    def values_left(self, rows: Sequence[Row]) -> None:
        """Called when an epoch has ended with these per-step values, which no flush has read."""
        run = self._run
        if run.log is not None and run.progress.stepped_batches < run.limits.log_every_n_steps:
            self._unlogged.update(row.name for row in rows if row.entry.to_logger)

    def on_train_end(self) -> None:
        steps, every = self._run.progress.stepped_batches, self._run.limits.log_every_n_steps
        if self._unlogged and 0 < steps < every:  # with 0 steps, the fit was stopped in its first window
            rank_zero_warn(
                f"{', '.join(sorted(self._unlogged))}: logged in training steps, but after {steps} steps no logger has "
                f"seen it, because log_every_n_steps={every}. Write a smaller log_every_n_steps. [DT1027]"
            )
