"""Mixed precision: autocast around the forward pass, parameters and gradients in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import NotSupportedError
from drivetrain.precision import MixedPrecision, Precision


def test_the_context_is_bf16_autocast() -> None:
    context = MixedPrecision().forward_context("cpu")
    assert context is not None
    with context:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("device", "expected"), [(None, "cuda"), ("cpu", "cpu")])
def test_c4_the_device_type_is_the_accelerators_unless_given(device: str | None, expected: str) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda kind, **options: made.append((kind, options)))
        MixedPrecision(device=device).forward_context("cuda")
    assert made == [(expected, {"dtype": torch.bfloat16, "cache_enabled": False})]


def test_t21_the_cast_cache_is_off_inside_and_as_it_was_outside() -> None:
    context = MixedPrecision().forward_context("cpu")
    assert context is not None
    before = torch.is_autocast_cache_enabled()
    with context:
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() is before


def test_parameters_and_gradients_stay_in_32_bits() -> None:
    plugin, layer = MixedPrecision(), nn.Linear(2, 1)
    assert isinstance(plugin, Precision)
    assert plugin.convert_module(layer) is layer
    context = plugin.forward_context("cpu")
    assert context is not None
    with context:
        out = layer(torch.ones(1, 2))
    assert out.dtype is torch.bfloat16
    plugin.backward(out.sum())
    assert layer.weight.dtype is torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("name", ["16-mixed", "16", "32-true"])
def test_what_needs_a_scaler_is_refused(name: str) -> None:
    with pytest.raises(NotSupportedError, match=f"MixedPrecision\\('{name}'\\).* Write precision=\"bf16-mixed\""):
        MixedPrecision(name)
