"""LearningRateMonitor: names, intervals and where the values go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from drivetrain.callbacks import LearningRateMonitor
from drivetrain.errors import ConfigurationError


class ListLogger:
    def __init__(self) -> None:
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, dict(metrics)))


def params(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def config(scheduler: Any, interval: str = "epoch", name: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name)


def trainer(optimizers: list[Any], configs: list[Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        optimizers=optimizers, lr_scheduler_configs=configs or [], loggers=[ListLogger()], callback_metrics={},
        is_logging_step=True, logger_step=7, is_global_zero=False,
    )  # fmt: skip


def run(monitor: LearningRateMonitor, trainer: Any) -> list[tuple[int | None, dict[str, float]]]:
    """One epoch of one batch, as the hook table would call it."""
    monitor.on_train_start(trainer, None)
    for hook, args in (("on_train_epoch_start", ()), ("on_train_batch_start", (None, 0))):
        if hook not in monitor.idle_hooks:
            getattr(monitor, hook)(trainer, None, *args)
    return trainer.loggers[0].calls


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_one_optimizer(interval: Any) -> None:
    fake, monitor = trainer([SGD(params(), lr=0.5)]), LearningRateMonitor(interval)
    assert run(monitor, fake) == [(7, {"lr-SGD": 0.5})]
    assert monitor.lrs == {"lr-SGD": [0.5]}
    assert fake.callback_metrics == {"lr-SGD": torch.tensor(0.5, dtype=torch.float64)}
    assert monitor.idle_hooks == {"on_train_batch_start" if interval == "epoch" else "on_train_epoch_start"}


def test_by_default_each_scheduler_has_its_own_interval() -> None:
    first, second, third = SGD(params(), lr=1.0), Adam(params(), lr=2.0), SGD(params(), lr=3.0)
    configs = [config(StepLR(first, 1), "step"), config(ReduceLROnPlateau(second), "epoch", name="plateau")]
    monitor = LearningRateMonitor()
    calls = run(monitor, trainer([first, second, third], configs))
    # the optimizer that has no scheduler at both
    assert calls == [(7, {"plateau": 2.0, "lr-SGD-1": 3.0}), (7, {"lr-SGD": 1.0, "lr-SGD-1": 3.0})]
    assert monitor.idle_hooks == frozenset()


def test_steps_without_logging_are_left_out() -> None:
    fake = trainer([SGD(params(), lr=0.5)])
    fake.is_logging_step = False
    assert run(LearningRateMonitor("step"), fake) == []


def test_names_of_groups_and_duplicates() -> None:
    two = Adam([{"params": params()}, {"params": params(), "lr": 0.25, "name": "head"}], lr=0.5)
    named = SGD([{"params": params(), "name": "only"}], lr=1.0)
    assert run(LearningRateMonitor("epoch"), trainer([two, Adam(params(), lr=2.0), Adam(params(), lr=3.0), named])) == [
        (7, {"lr-Adam/pg1": 0.5, "lr-Adam/head": 0.25, "lr-Adam-1": 2.0, "lr-Adam-2": 3.0, "lr-SGD/only": 1.0})
    ]


def test_momentum_and_weight_decay() -> None:
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    sgd = SGD([{"params": params()}, {"params": params()}], lr=1.0, momentum=0.75, weight_decay=0.5)
    (_, values), = run(monitor, trainer([sgd, Adam(params(), lr=2.0, betas=(0.25, 0.5))]))  # fmt: skip
    assert values == {
        "lr-SGD/pg1": 1.0, "lr-SGD/pg1-momentum": 0.75, "lr-SGD/pg1-weight_decay": 0.5,
        "lr-SGD/pg2": 1.0, "lr-SGD/pg2-momentum": 0.75, "lr-SGD/pg2-weight_decay": 0.5,
        "lr-Adam": 2.0, "lr-Adam-momentum": 0.25, "lr-Adam-weight_decay": 0.0,
    }  # fmt: skip
    assert set(monitor.lrs) == {"lr-SGD/pg1", "lr-SGD/pg2", "lr-Adam"}
    assert monitor.last_momentum_values["lr-Adam-momentum"] == 0.25
    assert monitor.last_weight_decay_values["lr-SGD/pg2-weight_decay"] == 0.5


def test_values_follow_the_schedule_and_groups_added_later() -> None:
    optimizer = SGD(params(), lr=1.0, momentum=0.75)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    fake, monitor = trainer([optimizer], [config(scheduler)]), LearningRateMonitor("epoch", True, True)
    run(monitor, fake)
    optimizer.step()
    scheduler.step()
    monitor.on_train_epoch_start(fake, None)
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5]}
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.75}
    optimizer.add_param_group({"params": params(), "lr": 0.1, "momentum": 0.5, "weight_decay": 0.25})
    monitor.on_train_epoch_start(fake, None)
    assert monitor.lrs == {"lr-SGD/pg1": [1.0, 0.5, 0.5], "lr-SGD/pg2": [0.1]}
    assert monitor.last_momentum_values == {"lr-SGD/pg1-momentum": 0.75, "lr-SGD/pg2-momentum": 0.5}
    assert monitor.last_weight_decay_values == {"lr-SGD/pg1-weight_decay": 0.0, "lr-SGD/pg2-weight_decay": 0.25}


def test_without_a_logger_the_cure_is_named() -> None:
    fake = trainer([])
    fake.loggers, fake.settings = [], SimpleNamespace(logger=False)
    with pytest.raises(ConfigurationError, match="Pass logger=True"):
        LearningRateMonitor().on_train_start(fake, None)


def test_unknown_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
