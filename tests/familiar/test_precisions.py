"""Precisions and strategies that were built alone, as programs written for Lightning use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.compat.fabric_strategies import FabricSingleDeviceStrategy
from drivetrain.errors import ConfigurationError
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from drivetrain.strategies import SingleDeviceStrategy


def test_the_scaler_is_there_at_once() -> None:
    precision = MixedPrecision("16-mixed", "cpu")
    assert precision.scaler is precision.scaler
    assert precision.scaler is not None
    assert precision.scaler.is_enabled()
    assert MixedPrecision("bf16-mixed").scaler is None


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_a_scaler_that_was_read_before_the_device_is_known() -> None:
    precision = MixedPrecision("16-mixed")
    early = precision.scaler
    precision.device_type = "cuda"
    assert precision.scaler is not early
    own = torch.amp.GradScaler("cpu")
    precision = MixedPrecision("16-mixed", scaler=own)
    precision.device_type = "cuda"
    assert precision.scaler is own


@pytest.mark.parametrize("parties", ["model", "model and optimizer", "none"])
def test_backward_and_the_step_scale_outside_of_a_run(parties: str) -> None:
    precision, layer = MixedPrecision("16-mixed", "cpu"), nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    arguments: dict[str, tuple[Any, ...]] = {"model": (layer,), "model and optimizer": (layer, optimizer), "none": ()}
    precision.backward(layer(torch.ones(1)).sum(), *arguments[parties])
    assert layer.weight.grad is not None
    assert precision.scaler is not None
    expected = precision.scaler.get_scale() if parties != "none" else 1.0  # the contract's call has been scaled already
    assert layer.weight.grad.item() == expected
    if parties == "none":  # so that an unscaled loss is no silent mistake
        with pytest.raises(
            ConfigurationError, match=r"no scaled loss was computed .* precision.backward\(loss, model\)"
        ):
            precision.optimizer_step(optimizer)
        assert layer.weight.item() == 1.0
    else:
        precision.optimizer_step(optimizer)
        assert layer.weight.item() == 0.5


def test_empty_init_skips_initialization() -> None:
    strategy, called = SingleDeviceStrategy(), []

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            nn.init.uniform_(self.weight, 1, 2)
            called.append(bool(self.weight.any()))

    for empty in (True, False, None):
        with strategy.tensor_init_context(empty_init=empty):
            Draws()
    assert called == [False, True, True]


@pytest.mark.parametrize("precision", [Precision(), DoublePrecision(), HalfPrecision("bf16-true")])
def test_a_strategy_and_a_precision_built_alone_skip_initialization(precision: Precision) -> None:
    strategy = FabricSingleDeviceStrategy("cpu", precision=precision)
    for empty in (True, False):
        with torch.random.fork_rng(), strategy.module_init_context(empty_init=empty):
            before = torch.random.get_rng_state()
            nn.Linear(2, 2)
            assert torch.equal(torch.random.get_rng_state(), before) is empty


def test_a_strategy_alone_has_torchs_device() -> None:
    assert SingleDeviceStrategy().root_device == torch.get_default_device()
    assert SingleDeviceStrategy("meta").root_device == torch.device("meta")
