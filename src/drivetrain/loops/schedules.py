"""Step the learning-rate schedulers after optimizer steps, after an epoch's last batch, or after a validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import NotLoggedError
from drivetrain.loops.run import Run
from drivetrain.module.optimizers import LRSchedulerConfig


class Schedules:
    """The schedulers that the Trainer steps in a run, grouped by the time of their steps.

    Attributes:
        step: the schedulers that are stepped after an optimizer step. epoch: the schedulers that are stepped after an
            epoch's last batch, before a validation.
        step_plateau, epoch_plateau: the schedulers that monitor a value; stepped after a validation.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_batch = parity.current().batch_counted_schedulers
        self._own_step = run.hooks.bind_method("lr_scheduler_step")
        # in manual optimization, the module steps its schedulers itself
        configs = run.engine.strategy.lr_scheduler_configs if run.module.automatic_optimization else []
        self.step = [c for c in configs if c.interval == "step" and not c.reduce_on_plateau]
        self.epoch = [c for c in configs if c.interval == "epoch" and not c.reduce_on_plateau]
        self.step_plateau = [c for c in configs if c.interval == "step" and c.reduce_on_plateau]
        self.epoch_plateau = [c for c in configs if c.interval == "epoch" and c.reduce_on_plateau]

    def advance_step(self, configs: Sequence[LRSchedulerConfig]) -> None:
        """Call :meth:`advance` with the number of optimizer steps."""
        progress = self._run.progress
        self.advance(configs, progress.batch_idx + 1 if self._by_batch else progress.global_step)

    def advance(self, configs: Sequence[LRSchedulerConfig], count: int) -> None:
        """Step the schedulers whose frequency divides ``count``, the number of optimizer steps or epochs so far.

        Raises:
            NotLoggedError: a strict scheduler monitors a value that was never logged.
        """
        for config in configs:
            if count % config.frequency:
                continue
            if config.reduce_on_plateau:
                metrics = self._run.book.refresh()
                if config.monitor in metrics:
                    value = self._run.book.of_rank_zero(config.monitor, metrics[config.monitor])
                    self._run.hooks.call_method("lr_scheduler_step", config.scheduler, value)
                else:
                    self._missing(config, metrics)
            elif self._own_step is not None:
                self._own_step(config.scheduler, None)
            else:
                config.scheduler.step()

    def check_watched(self) -> None:
        """Check that the monitored value of each scheduler with a ``frequency`` above 1 was logged. Called at the end
        of a fast_dev_run, which is too short to step these schedulers.

        Raises:
            NotLoggedError: a strict scheduler monitors a value that was never logged.
        """
        metrics = self._run.book.refresh()
        for config in (*self.step_plateau, *self.epoch_plateau):
            if config.frequency > 1 and config.monitor not in metrics:
                self._missing(config, metrics)

    def _missing(self, config: LRSchedulerConfig, metrics: dict[str, Any]) -> None:
        cure = 'Log it, or set "strict": False to skip the scheduler while it is missing.'
        if config.interval == "step":
            cure = (
                'With "interval": "step" the scheduler reads it after an optimizer step, before the first validation. '
                'If a validation logs the value, write "interval": "epoch"; else log it in training_step.'
            )
        message = (
            f"{type(config.scheduler).__name__} watches {config.monitor!r}, which was not logged. "
            f"{self._run.why_not_validated()}Logged so far: {', '.join(sorted(metrics)) or 'nothing'}. {cure} [DT1030]"
        )
        if config.strict:
            raise NotLoggedError(message)
        rank_zero_warn(message)
