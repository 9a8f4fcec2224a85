"""How the losses of a window add up to one gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.loops.window import Window


def parameter(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return weight, torch.optim.SGD([weight], lr=0.1)


def run_window(slopes: list[float], weights: list[Any], expected: int | None = None) -> float:
    """The gradient of a window whose micro-batches have these slopes and weights."""
    weight, optimizer = parameter()
    window = Window()
    window.divisor = len(slopes) if expected is None else expected
    for position, (slope, share) in enumerate(zip(slopes, weights, strict=True), start=1):
        loss = (weight * slope).sum()
        window.part(loss, share, optimizer, position, last=position == len(slopes)).backward()
    factor = window.factor()
    assert weight.grad is not None
    if factor is not None:
        weight.grad.mul_(factor)
    return float(weight.grad)


@pytest.mark.parametrize("weights", [[1, 3], [3, 1], [1, 3, 2], [5.5, 0.5, 11], [1000, 1, 1], [1, 1, 100_000]])
@pytest.mark.parametrize("on_device", [False, True])
def test_t12_a_windows_gradient_is_the_weighted_mean(weights: list[float], on_device: bool) -> None:
    slopes = [2.0, -1.0, 7.0][: len(weights)]
    given = [torch.tensor(weight) for weight in weights] if on_device else weights

    found = run_window(slopes, given)

    expected = sum(w * s for w, s in zip(weights, slopes, strict=True)) / sum(weights)
    assert found == pytest.approx(expected, rel=1e-6 if on_device else 1e-14)


def test_no_micro_batch_is_ever_scaled_up() -> None:
    weight, optimizer = parameter()
    window = Window()
    scaled = []
    for share in (1, 4096, 3, 100_000, 7):
        loss = window.weigh(weight.sum(), share, optimizer)
        window.batches_with_gradients += 1
        loss.backward()
        scaled.append(float(loss.detach()))

    assert max(scaled) <= 1.0
    assert weight.grad is not None
    assert float(weight.grad) <= 5.0


def test_a_window_of_one_is_bit_equal_to_the_plain_loss() -> None:
    weight, optimizer = parameter(0.3)
    loss = weight.exp().sum()
    window = Window()

    assert window.weigh(loss, 17, optimizer) is loss
    window.batches_with_gradients = 1
    assert window.factor() is None


def test_t12_a_short_window_is_divided_by_what_it_holds() -> None:
    assert run_window([3.0], [None], expected=3) == pytest.approx(3.0)
    assert run_window([3.0, 6.0], [None, None], expected=3) == pytest.approx(4.5)


def test_weights_of_zero_on_the_device_give_zero_and_not_nan() -> None:
    assert run_window([0.0, 0.0], [torch.tensor(0), torch.tensor(0)]) == 0.0
    assert run_window([5.0, 2.0], [torch.tensor(0), torch.tensor(4)]) == pytest.approx(2.0)


@pytest.mark.parametrize("first", [True, False])
def test_weighted_and_plain_losses_do_not_mix(first: bool) -> None:
    with pytest.raises(ConfigurationError, match="Return a WeightedLoss for all of them, or for none"):
        run_window([1.0, 1.0], [2, None] if first else [None, 2])
