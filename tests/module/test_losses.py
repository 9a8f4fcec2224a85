"""What training_step may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.module.losses import loss_of, outputs_for_hooks


def test_a_weight_of_the_number_zero_counts_for_nothing() -> None:
    assert loss_of(WeightedLoss(torch.tensor(float("nan")), 0)) == (None, None)


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
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    loss = (weight * 2).sum()
    for output in (loss, WeightedLoss(loss, 3), {"loss": loss, "y": weight * 3}, {"loss": WeightedLoss(loss, 3)}):
        given = outputs_for_hooks(output)
        assert given["loss"].item() == 2.0
        assert not any(value.requires_grad for value in given.values() if isinstance(value, torch.Tensor))
    assert outputs_for_hooks(WeightedLoss(loss, 3)) == {"loss": loss.detach(), "weight": 3}
    assert outputs_for_hooks(None) == {}
