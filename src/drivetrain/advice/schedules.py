"""Warnings about limits and schedules that a fit never reaches, or for which it is too short."""

from __future__ import annotations

import math
from typing import Any

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import number_of
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.optimizers import LRSchedulerConfig


class LimitsWatch:
    """Compares a fit's limits, the lengths of its epochs and its schedulers, and explains why a fit trains nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def nothing_trained(self) -> None:
        progress, limits = self._run.progress, self._run.limits
        counts = (
            (progress.current_epoch, limits.max_epochs, "epochs"),
            (progress.global_step, limits.max_steps, "steps"),
        )
        done = [f"{count} of {limit} {what}" for count, limit, what in counts if limit != ENDLESS]
        rank_zero_info(
            f"Nothing to train: {' and '.join(done) or f'{progress.global_step} steps'} are done."
            + (" limit_train_batches is 0." if limits.train_batches == 0 else "")
            + (" A request to stop is in force." if progress.should_stop else "")
            + (" To train on, raise these limits; to train from the beginning, make a new Trainer." if done else "")
        )

    def on_train_start(self) -> None:
        run, limits = self._run, self._run.limits
        epochs, batches = limits.max_epochs, run.progress.num_training_batches
        starts = run.progress.epochs_done == 0
        if starts and epochs != ENDLESS and run.validates() and (cause := self._never_validates()):
            rank_zero_warn(f"This fit never validates: {cause}. Write a smaller number.")
        if not run.module.automatic_optimization:
            return
        if epochs != ENDLESS and batches != ENDLESS:
            steps = min(epochs * math.ceil(batches / limits.accumulate), limits.max_steps)
            for config in run.engine.strategy.lr_scheduler_configs:
                _warn_of_schedule(config, epochs, steps)
        if batches and batches < limits.accumulate and not run.settings.fast_dev_run:
            few = f"{number_of(int(batches), 'batch')}, fewer than accumulate_grad_batches={limits.accumulate}"
            rank_zero_info(f"An epoch has {few}: each epoch makes one optimizer step.")

    def _never_validates(self) -> str:
        """Return which limit is too large for any validation to run, as text; "" if a validation runs."""
        limits, batches = self._run.limits, self._run.progress.num_training_batches
        epochs, every, interval = limits.max_epochs, limits.check_val_every_n_epoch, limits.val_check_interval
        if every is not None:
            too_rare = every > epochs
            return f"check_val_every_n_epoch={every} is more than max_epochs={epochs:.0f}" if too_rare else ""
        if not isinstance(interval, int) or interval <= epochs * batches:
            return ""
        return f"val_check_interval={interval} is more than the {epochs * batches:.0f} batches of {epochs:.0f} epochs"


def _warn_of_schedule(config: LRSchedulerConfig, epochs: float, steps: float) -> None:
    """Warn about a scheduler that is meant for steps but stepped once per epoch, or that never steps in this fit."""
    name, interval = type(config.scheduler).__name__, config.interval
    length = "total_steps" if hasattr(config.scheduler, "total_steps") else "T_max"
    total, due = getattr(config.scheduler, length, None), epochs if interval == "epoch" else steps
    if due < config.frequency and epochs > 1:  # a single epoch is often a trial
        rank_zero_warn(
            f'{name} never steps in this fit: "frequency": {config.frequency} is more than its {due:.0f} '
            f"{interval}s. Write a smaller number."
        )
    elif interval != "epoch" or not isinstance(total, int) or total <= 2 * epochs:
        return
    elif length == "total_steps" or total >= steps:
        rank_zero_warn(
            f"{name}({length}={total}) steps once an epoch, {epochs:.0f} times in this fit, and does not come to its "
            'end. Add "interval": "step" to its dictionary.'
        )


def scheduler_counts(run: Run) -> list[Any]:
    """Return how often each scheduler of ``run`` has stepped, by torch's count."""
    return [getattr(each.scheduler, "last_epoch", None) for each in run.engine.strategy.lr_scheduler_configs]
