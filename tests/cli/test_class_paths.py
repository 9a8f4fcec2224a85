from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import LightningModule
from drivetrain.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    instantiate_class,
)
from drivetrain.errors import ConfigurationError

Make = Callable[..., Any]


def test_a_class_is_made_of_its_description() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    optimizer = instantiate_class((weights,), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}})
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(instantiate_class(2, {"class_path": "torch.nn.ReflectionPad1d"})) is nn.ReflectionPad1d


def test_a_plateau_scheduler_takes_torchs_arguments_in_their_order() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, "val_loss", "max", 0.5, patience=3)
    assert (scheduler.monitor, scheduler.mode, scheduler.factor, scheduler.patience) == ("val_loss", "max", 0.5, 3)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ({"init_args": {}}, "which names no class"),
        ({"class_path": "torch.optim.Sgd"}, "no class at the path 'torch.optim.Sgd'"),
        ({"class_path": "no_such_package.X"}, "no class at the path 'no_such_package.X'"),
        ({"class_path": "SGD"}, "no class at the path 'SGD'"),
    ],
)
def test_a_wrong_description_is_refused(init: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        instantiate_class((), init)


class Described(LightningModule):
    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.made = [instantiate_class((self.parameters(),), init) for init in (first, second)]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_linked_optimizer_arrives_as_a_description(cli: Make, fixed: bool) -> None:
    class Two(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            offered: Any = torch.optim.Adam if fixed else (torch.optim.Optimizer,)
            parser.add_optimizer_args(offered, "one", link_to="model.first")
            parser.add_optimizer_args(offered, "two", link_to="model.second")

    names = [] if fixed else ["--one=Adam", "--two=Adam"]
    made = cli(*names, "--one.lr=0.5", "--two.lr=0.25", cls=Two, run=False, model_class=Described)
    assert [type(optimizer) for optimizer in made.model.made] == [torch.optim.Adam] * 2
    assert [optimizer.param_groups[0]["lr"] for optimizer in made.model.made] == [0.5, 0.25]


class Making(LightningModule):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam, scheduler: LRSchedulerCallable | None = None):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.made = optimizer(self.parameters())
        self.schedule = scheduler(self.made) if scheduler else None


def test_a_module_may_take_what_makes_its_optimizer(cli: Make) -> None:
    words = ("--model.optimizer=SGD", "--model.optimizer.lr=0.5", "--model.scheduler=StepLR")
    made = cli(*words, "--model.scheduler.step_size=3", run=False, model_class=Making)
    assert type(made.model.made) is torch.optim.SGD
    assert made.model.made.param_groups[0]["lr"] == 0.5
    assert made.model.schedule.step_size == 3
    assert type(cli(run=False, model_class=Making).model.made) is torch.optim.Adam


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_optimizes_its_own_parameters(cli: Make, program: Any, copied: Callable[[Any], Any]) -> None:
    model = cli("--optimizer=SGD", run=False, model_class=program.Bare).model
    twin = copied(model)
    assert twin.configure_optimizers().param_groups[0]["params"][0] is next(twin.parameters())
    assert model.configure_optimizers().param_groups[0]["params"][0] is next(model.parameters())
