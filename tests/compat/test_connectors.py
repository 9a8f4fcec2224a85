"""Private names that libraries import, and what they ask them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.compat.connectors import _AcceleratorConnector, _MockOptimizer
from drivetrain.errors import ConfigurationError


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
