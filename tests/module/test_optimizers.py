"""Every form that configure_optimizers may return, and every one it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from drivetrain.errors import ConfigurationError
from drivetrain.module.optimizers import LRSchedulerConfig, normalise


def sgd() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


OPTIMIZER, OTHER = sgd(), Adam([nn.Parameter(torch.zeros(1))])
STEP, OTHER_STEP = StepLR(OPTIMIZER, 1), StepLR(OTHER, 1)
PLATEAU = ReduceLROnPlateau(OPTIMIZER)


class Warmup:
    """A scheduler that owes nothing to torch."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


WARMUP = Warmup()
DEFAULT = LRSchedulerConfig(STEP)
WATCHING = LRSchedulerConfig(PLATEAU, reduce_on_plateau=True, monitor="val_loss")


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        pytest.param(None, [], [], id="nothing"),
        pytest.param(OPTIMIZER, [OPTIMIZER], [], id="an optimizer"),
        pytest.param([OPTIMIZER, OTHER], [OPTIMIZER, OTHER], [], id="a list"),
        pytest.param((OPTIMIZER, OTHER), [OPTIMIZER, OTHER], [], id="a tuple"),
        pytest.param([], [], [], id="an empty list"),
        pytest.param(([OPTIMIZER], [STEP]), [OPTIMIZER], [DEFAULT], id="two lists"),
        pytest.param([[OPTIMIZER], [STEP]], [OPTIMIZER], [DEFAULT], id="a list of two lists"),
        pytest.param(([OPTIMIZER], []), [OPTIMIZER], [], id="two lists, no scheduler"),
        pytest.param(
            ([OPTIMIZER], [{"scheduler": STEP, "interval": "step", "frequency": 3, "name": "lr", "strict": False}]),
            [OPTIMIZER],
            [LRSchedulerConfig(STEP, name="lr", interval="step", frequency=3, strict=False)],
            id="two lists, a dictionary among the schedulers",
        ),
        pytest.param({"optimizer": OPTIMIZER}, [OPTIMIZER], [], id="a dictionary"),
        pytest.param({"optimizer": OPTIMIZER, "lr_scheduler": None}, [OPTIMIZER], [], id="no scheduler in it"),
        pytest.param({"optimizer": OPTIMIZER, "lr_scheduler": STEP}, [OPTIMIZER], [DEFAULT], id="a scheduler in it"),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": STEP, "interval": "step"}},
            [OPTIMIZER],
            [LRSchedulerConfig(STEP, interval="step")],
            id="a scheduler's dictionary in it",
        ),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "val_loss"},
            [OPTIMIZER],
            [WATCHING],
            id="a monitor beside it",
        ),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU}, "monitor": "val_loss"},
            [OPTIMIZER],
            [WATCHING],
            id="a monitor beside the scheduler's dictionary",
        ),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "val_loss"}, "monitor": "other"},
            [OPTIMIZER],
            [WATCHING],
            id="the scheduler's own monitor wins",
        ),
        pytest.param(
            [{"optimizer": OPTIMIZER, "lr_scheduler": STEP}, {"optimizer": OTHER, "lr_scheduler": OTHER_STEP}],
            [OPTIMIZER, OTHER],
            [DEFAULT, LRSchedulerConfig(OTHER_STEP)],
            id="a list of dictionaries",
        ),
        pytest.param(
            [{"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "val_loss"}, {"optimizer": OTHER}],
            [OPTIMIZER, OTHER],
            [WATCHING],
            id="a list of dictionaries, each with its monitor",
        ),
        pytest.param(
            ([OPTIMIZER], [{"scheduler": WARMUP, "reduce_on_plateau": True, "monitor": "x"}]),
            [OPTIMIZER],
            [LRSchedulerConfig(WARMUP, reduce_on_plateau=True, monitor="x")],
            id="a scheduler of one's own that watches a value",
        ),
    ],
)
def test_forms(returned: Any, optimizers: list[Optimizer], schedulers: list[LRSchedulerConfig]) -> None:
    found, configs = normalise(returned)
    assert [id(optimizer) for optimizer in found] == [id(optimizer) for optimizer in optimizers]
    assert configs == schedulers


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        pytest.param(3, "returned an int: 3. Return an optimizer", id="a number"),
        pytest.param("sgd", "returned a str: 'sgd'. Return an optimizer", id="a name"),
        pytest.param((OPTIMIZER, STEP), "returned a StepLR: .*, where an optimizer", id="scheduler without lists"),
        pytest.param([nn.Parameter(torch.zeros(1))], "a Parameter: .*, where an optimizer", id="parameters"),
        pytest.param({"optimizer": None}, "returned None, where an optimizer belongs", id="None in it"),
        pytest.param({"lr_scheduler": STEP}, "a dictionary with no key 'optimizer'", id="no optimizer"),
        pytest.param({"g": OPTIMIZER, "d": OTHER}, "'g'. For several optimizers, return a list", id="several by name"),
        pytest.param({"optimizer": OPTIMIZER, "sched": STEP}, "the unknown key 'sched'", id="unknown key"),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": STEP, "intervall": "step"}},
            "unknown key 'intervall'. Did you mean 'interval'?",
            id="unknown key of a scheduler",
        ),
        pytest.param(
            {"optimizer": OPTIMIZER, "lr_scheduler": {"interval": "step"}},
            r"no key 'scheduler', only \['interval'\]",
            id="no scheduler in its dictionary",
        ),
        pytest.param(([OPTIMIZER], [object()]), "and configure_optimizers returned an object: ", id="not a scheduler"),
        pytest.param(
            ([OPTIMIZER], [{"scheduler": STEP, "interval": "batch"}]), '"epoch" or "step", not \'batch\'', id="interval"
        ),
        pytest.param(([OPTIMIZER], [{"scheduler": STEP, "frequency": 0}]), "at least 1, not 0", id="frequency 0"),
        pytest.param(([OPTIMIZER], [{"scheduler": STEP, "frequency": 0.5}]), "at least 1, not 0.5", id="frequency"),
        pytest.param(([OPTIMIZER], [PLATEAU]), "ReduceLROnPlateau needs the name of the value", id="no monitor"),
        pytest.param(([OTHER], [STEP]), "StepLR was built for an optimizer that", id="another optimizer's scheduler"),
    ],
)
def test_errors(returned: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        normalise(returned)


def test_the_plateau_is_recognised_and_can_be_overruled() -> None:
    _, (config,) = normalise(([OPTIMIZER], [{"scheduler": PLATEAU, "reduce_on_plateau": False}]))
    assert not config.reduce_on_plateau
    assert config.monitor is None


def test_the_returned_dictionary_is_left_alone() -> None:
    inner: dict[str, Any] = {"scheduler": PLATEAU}
    returned = {"optimizer": OPTIMIZER, "lr_scheduler": inner, "monitor": "val_loss"}
    normalise(returned)
    assert inner == {"scheduler": PLATEAU}
    assert set(returned) == {"optimizer", "lr_scheduler", "monitor"}


def test_a_scheduler_of_ones_own_may_belong_to_nobody() -> None:
    _, (config,) = normalise(([OPTIMIZER], [WARMUP]))
    assert config.scheduler is WARMUP
    assert not isinstance(WARMUP, LRScheduler)


def test_a_monitor_that_nothing_looks_at_is_said(caplog: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
    with caplog.at_level("INFO", logger="drivetrain"):
        normalise({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": scheduler}, "monitor": "val_loss"})
        normalise([{"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "val_loss"}}])
    assert caplog.text == ""  # of one beside the optimizer, some scheduler may be meant
    with caplog.at_level("INFO", logger="drivetrain"):
        normalise({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}})
    assert "StepLR steps without looking at a metric" in caplog.text


def test_a_plateau_scheduler_that_takes_the_lowest_accuracy_for_the_best_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"the lowest 'val_acc' as the best.* mode=\"max\""):
        normalise({"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "val_acc"})
    normalise({"optimizer": OPTIMIZER, "lr_scheduler": ReduceLROnPlateau(OPTIMIZER, "max"), "monitor": "val_acc"})
