"""Private names that libraries import, and what they ask them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from drivetrain.compat import connectors, finder
from drivetrain.compat.connectors import _AcceleratorConnector, _MockOptimizer, do_nothing_closure
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.precision import DoublePrecision


@pytest.mark.parametrize(
    ("arguments", "name", "devices"),
    [
        ({}, "cpu", 1),
        ({"accelerator": "cpu", "devices": "1"}, "cpu", 1),
        ({"accelerator": "cpu", "devices": 3}, "cpu", 3),
    ],
)
def test_the_accelerator_and_devices_that_a_trainer_would_choose(
    arguments: dict[str, Any], name: str, devices: Any
) -> None:
    """scvi-tools asks before it makes its Trainer."""
    chosen = _AcceleratorConnector(**arguments)
    assert (chosen._accelerator_flag, chosen._devices_flag) == (name, devices)
    assert len(chosen._parallel_devices) == devices


def test_an_unknown_accelerator_is_an_error_of_value() -> None:
    with pytest.raises(ConfigurationError, match="there is no such accelerator"):
        _AcceleratorConnector(accelerator="nothing")


def test_the_precision_that_a_trainer_would_choose() -> None:
    """nequip wraps the method that Lightning asks."""
    chosen = _AcceleratorConnector(accelerator="cpu", precision="64-true")
    assert isinstance(chosen._check_and_init_precision(), DoublePrecision)


def test_classes_that_register_themselves_are_asked_to() -> None:
    """nequip registers its accelerator so."""

    class Parent:
        @classmethod
        def register(cls, registry: list[str]) -> None:
            raise AssertionError(cls)

    class Plain(Parent):
        pass

    class Own(Parent):
        @classmethod
        def register(cls, registry: list[str]) -> None:
            registry.append(cls.__name__)

    module, registry = ModuleType("own"), list[str]()
    vars(module).update(Plain=Plain, Own=Own, Other=int, text="register")
    connectors._register_classes(registry, "register", module, Parent)
    assert registry == ["Own"]


def test_a_trainer_shows_the_same(make_trainer: Any) -> None:
    shown = make_trainer(accelerator="cpu")._accelerator_connector
    assert (shown._accelerator_flag, shown._parallel_devices) == ("cpu", [torch.device("cpu")])


def test_a_scheduler_can_be_tried_on_an_optimizer_without_parameters() -> None:
    optimizer = _MockOptimizer()
    assert optimizer.param_groups == []
    assert optimizer.step() is None
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(TypeError):
        torch.optim.lr_scheduler.StepLR(optimizer, 2, wrong=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["_get_full_state_dict_context", "_setup_activation_checkpointing"])
def test_what_is_for_fsdp1_says_so_when_it_is_called(name: str) -> None:
    """finetuning-scheduler imports both, and calls them under FSDP only."""
    with pytest.raises(NotSupportedError, match=f"{name} is for FullyShardedDataParallel of torch .FSDP1.*Write "):
        getattr(connectors, name)(module=None)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("trainer.connectors.accelerator_connector", ["_AcceleratorConnector"]),
        ("trainer.connectors.callback_connector", ["_CallbackConnector"]),
        ("trainer.connectors.checkpoint_connector", ["_CheckpointConnector"]),
        ("trainer.connectors.logger_connector.result", ["_ResultCollection", "_ResultMetric"]),
        ("core.optimizer", ["_MockOptimizer"]),
    ],
)
def test_private_names_that_libraries_import(module: str, names: list[str]) -> None:
    for name in names:
        home, ours = finder.find(f"pytorch.{module}", name) or ("", "")
        assert isinstance(getattr(importlib.import_module(home), ours), type)


def test_a_closure_that_does_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    assert torch.optim.SGD([weight], lr=0.5).step(do_nothing_closure) is None  # type: ignore[func-returns-value]
    assert weight.item() == 0.5
