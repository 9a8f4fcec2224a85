from __future__ import annotations

import pickle
import typing

import torch

from drivetrain import Trainer
from drivetrain.compat import type_names
from drivetrain.module.optimizers import LRSchedulerConfig


def test_they_may_be_written_where_types_are() -> None:
    def step(
        loss: type_names.STEP_OUTPUT, loaders: type_names.TRAIN_DATALOADERS | None
    ) -> type_names.OptimizerLRScheduler: ...

    assert set(typing.get_type_hints(step)) == {"loss", "loaders", "return"}
    assert typing.Optional[type_names.STEP_OUTPUT]  # noqa: UP045  # as older programs write it


def test_optimizers_schedulers_and_groups_are_told_by_what_they_have() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert isinstance(optimizer, type_names.Optimizable)
    assert isinstance(optimizer, type_names.Steppable)
    assert not isinstance(parameter, type_names.Steppable)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert isinstance(scheduler, type_names.LRSchedulerTypeTuple)
    assert isinstance(scheduler, type_names.LRSchedulerTypeUnion)
    assert LRSchedulerConfig(scheduler).interval == "epoch"

    class Group:
        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    assert isinstance(Group(), type_names.CollectibleGroup)


def test_dictionaries_of_schedulers_have_one_required_key() -> None:
    assert type_names.LRSchedulerConfigType.__required_keys__ == {"scheduler"}
    assert type_names.OptimizerLRSchedulerConfig.__optional_keys__ == {"monitor"}
    assert pickle.loads(pickle.dumps(type_names.OptimizerConfig)) is type_names.OptimizerConfig


def test_the_smallest_differences() -> None:
    assert 1 + type_names.FLOAT64_EPSILON > 1 == 1 + type_names.FLOAT64_EPSILON / 2
    assert type_names.FLOAT16_EPSILON == 2**-10
    assert type_names.FLOAT32_EPSILON == 2**-23


def test_precisions_for_command_lines() -> None:
    assert "bf16-mixed" in typing.get_args(type_names._PRECISION_INPUT_STR)
    choices = [value for part in typing.get_args(type_names._PRECISION_INPUT) for value in typing.get_args(part)]
    assert {64, "16-true", "bf16"} <= set(choices)
    for precision in choices:
        if precision not in ("transformer-engine", "transformer-engine-float16"):  # need a package
            Trainer(precision=precision, accelerator="cpu", logger=False)
