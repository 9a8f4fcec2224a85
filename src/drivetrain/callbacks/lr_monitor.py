"""Log learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, check_choice
from drivetrain.trainer.telling import check_loggers, log

Interval = Literal["step", "epoch"]


class LearningRateMonitor(Callback):
    """Logs each optimizer's learning rate.

    The logged name is the scheduler's ``name``, or otherwise ``lr-<optimizer's class>``. If several schedulers or
    optimizers have this name, the second gets ``-1`` after it, and the third ``-2``. If an optimizer has several
    parameter groups, ``/pg1``, ``/pg2`` or the group's ``name`` is appended.

    Args:
        logging_interval: "step" logs whenever the Trainer writes to the loggers, and "epoch" when an epoch begins.
            ``None`` logs at the interval of the optimizer's scheduler; without a scheduler, at both intervals.
        log_momentum: also log ``<name>-momentum``; the momentum of Adam and similar optimizers is the first beta.
        log_weight_decay: also log ``<name>-weight_decay``.

    Attributes:
        lrs: the learning rates logged so far, by name.
        last_momentum_values, last_weight_decay_values: the latest momentum and weight decay of each group, by logged
            name.

    Raises:
        ConfigurationError: ``logging_interval`` is invalid; or training starts without a logger.
    """

    def __init__(
        self,
        logging_interval: Interval | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        super().__init__()
        check_choice("LearningRateMonitor", "logging_interval", logging_interval, ("step", "epoch", None))
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        if logging_interval is not None:
            self.idle_hooks = frozenset(
                {"on_train_batch_start" if logging_interval == "epoch" else "on_train_epoch_start"}
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start new records."""
        check_loggers(trainer, self)
        for optimizer in trainer.optimizers:
            names = [name for name, _ in _groups(optimizer)]
            if len(set(names)) < len(names):
                raise ConfigurationError(
                    f"LearningRateMonitor would log parameter groups of {type(optimizer).__name__} under one name: "
                    f"{', '.join(repr(name.removeprefix('/')) for name in names)}. Give each group a name of its own."
                )
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Log the values with the interval "step"."""
        if trainer.is_logging_step:
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values with the interval "epoch"."""
        self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: Interval) -> None:
        if self.logging_interval not in (None, interval):
            return
        values: dict[str, float] = {}
        for name, optimizer, own_interval in _curves(trainer):
            if self.logging_interval is None and own_interval not in (interval, None):
                continue
            for suffix, group in _groups(optimizer):
                values.update(self._read(name, suffix, group))
        if not values:
            return
        log(trainer, values, trainer.logger_step)
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        )

    def _read(self, name: str, suffix: str, group: dict[str, Any]) -> dict[str, float]:
        key = f"{name}{suffix}"
        # the optimizer has got a second group, so the logged name of the first group changes
        if suffix == "/pg1" and name in self.lrs:
            self.lrs[key] = self.lrs.pop(name)
            self.last_momentum_values.pop(f"{name}-momentum", None)
            self.last_weight_decay_values.pop(f"{name}-weight_decay", None)
        values = {key: float(group["lr"])}
        self.lrs.setdefault(key, []).append(values[key])
        if self.log_momentum:
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            key = f"{name}{suffix}-momentum"
            values[key] = self.last_momentum_values[key] = float(momentum)
        if self.log_weight_decay:
            key = f"{name}{suffix}-weight_decay"
            values[key] = self.last_weight_decay_values[key] = float(group.get("weight_decay", 0.0))
        return values


def _curves(trainer: Trainer) -> Iterator[tuple[str, Optimizer, str | None]]:
    """Yield the logged name, the optimizer and the interval of each scheduler, then of each optimizer without a
    scheduler. Without a scheduler, the interval is ``None``.
    """
    taken: dict[str, int] = {}
    scheduled: list[Optimizer] = []

    def unique(name: str) -> str:
        taken[name] = taken.get(name, -1) + 1
        return f"{name}-{taken[name]}" if taken[name] else name

    for config in trainer.lr_scheduler_configs:
        optimizer = config.scheduler.optimizer
        scheduled.append(optimizer)
        yield unique(config.name or f"lr-{type(optimizer).__name__}"), optimizer, config.interval
    for optimizer in trainer.optimizers:
        if not any(optimizer is other for other in scheduled):
            yield unique(f"lr-{type(optimizer).__name__}"), optimizer, None


def _groups(optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter group and the suffix that it adds to the logged name."""
    groups = optimizer.param_groups
    for number, group in enumerate(groups, start=1):
        name = group.get("name", f"pg{number}" if len(groups) > 1 else "")
        yield (f"/{name}" if name else ""), group
