"""WeightedLoss, and how the losses of a window add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.module.losses import Window, loss_of, outputs_for_hooks


def parameter(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return weight, torch.optim.SGD([weight], lr=0.1)


def run_window(slopes: list[float], weights: list[Any], expected: int | None = None) -> float:
    """The gradient of a window whose micro-batches have these slopes and weights."""
    weight, optimizer = parameter()
    window = Window()
    window.expected = len(slopes) if expected is None else expected
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
        window.graded += 1
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
    window.graded = 1
    assert window.factor() is None


def test_t12_a_short_window_is_divided_by_what_it_holds() -> None:
    assert run_window([3.0], [None], expected=3) == pytest.approx(3.0)
    assert run_window([3.0, 6.0], [None, None], expected=3) == pytest.approx(4.5)


def test_weights_of_zero_on_the_device_give_zero_and_not_nan() -> None:
    assert run_window([0.0, 0.0], [torch.tensor(0), torch.tensor(0)]) == 0.0
    assert run_window([5.0, 2.0], [torch.tensor(0), torch.tensor(4)]) == pytest.approx(2.0)


def test_a_weight_of_the_number_zero_counts_for_nothing() -> None:
    assert loss_of(WeightedLoss(torch.tensor(float("nan")), 0)) == (None, None)


@pytest.mark.parametrize("first", [True, False])
def test_weighted_and_plain_losses_do_not_mix(first: bool) -> None:
    with pytest.raises(ConfigurationError, match="Return a WeightedLoss for all of them, or for none"):
        run_window([1.0, 1.0], [2, None] if first else [None, 2])


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan")])
def test_a_weight_must_be_a_finite_count(weight: float) -> None:
    with pytest.raises(ConfigurationError, match="give a finite number of at least 0"):
        loss_of(WeightedLoss(torch.tensor(1.0), weight))


def test_a_weight_is_one_number() -> None:
    with pytest.raises(ConfigurationError, match="sum it first"):
        loss_of(WeightedLoss(torch.tensor(1.0), torch.ones(3)))


def test_t23_what_training_step_may_return() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) == (loss, None)
    assert loss_of(None) == (None, None)
    assert loss_of({"loss": loss, "extra": 1}) == (loss, None)
    assert loss_of(WeightedLoss(loss, 4)) == (loss, 4)
    assert loss_of({"loss": WeightedLoss(loss, 4)}) == (loss, 4)


@pytest.mark.parametrize("wrong", [1.0, "loss", [torch.tensor(1.0)], {"losses": torch.tensor(1.0)}, {"loss": 1.0}])
def test_t23_anything_else_is_an_error(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="training_step returned a"):
        loss_of(wrong)


def test_t23_hooks_get_the_unscaled_loss_and_extras_without_their_graph() -> None:
    weight, _ = parameter()
    loss = (weight * 2).sum()
    for output in (loss, WeightedLoss(loss, 3), {"loss": loss, "y": weight * 3}, {"loss": WeightedLoss(loss, 3)}):
        given = outputs_for_hooks(output)
        assert given is not None
        assert given["loss"].item() == 2.0
        assert not any(value.requires_grad for value in given.values() if isinstance(value, torch.Tensor))
    assert outputs_for_hooks(WeightedLoss(loss, 3)) == {"loss": loss.detach(), "weight": 3}
    assert outputs_for_hooks(None) is None
