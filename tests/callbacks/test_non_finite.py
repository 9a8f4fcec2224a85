from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import Regression, regression_data
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.callbacks import TerminateOnNaN
from drivetrain.callbacks.non_finite import NonFiniteLossError
from drivetrain.errors import ConfigurationError


class Root(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sqrt()  # NaN below 0


class Bad(Regression):
    def __init__(self, where: str) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.where = where
        self.net.insert(2, Root())
        if where != "layer":
            self.net[2] = nn.Identity()
        else:
            self.net[1] = nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        if batch_idx == 2 and self.where == "parameter":
            self.net[0].weight.data[0, 0] = float("nan")
        loss = self.loss(batch)
        return loss * float("inf") if self.where == "loss" else loss


@pytest.mark.parametrize(
    ("where", "cause", "batch"),
    [
        ("layer", r"first layer whose output is not finite is net\.2 \(Root\)", 0),
        ("parameter", r"the parameter net\.0\.weight was not finite before this batch", 2),
        ("loss", "all layers have finite outputs, so it came from the computation of the loss", 0),
        ("batch", "the batch itself has values that are not finite, in '0'", 1),
    ],
)
def test_it_names_the_batch_the_rank_and_where_it_came_from(
    make_trainer: Any, where: str, cause: str, batch: int
) -> None:
    data = regression_data()
    if where == "batch":
        data.tensors[0][9, 1] = float("inf")
    module = Bad(where)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(NonFiniteLossError, match=cause) as caught:
        make_trainer(callbacks=TerminateOnNaN()).fit(module, DataLoader(data, batch_size=8))
    assert f"The loss of batch {batch} in epoch 0 is not finite. On rank 0 the loss is" in str(caught.value)
    assert isinstance(caught.value, ArithmeticError)
    if batch == 0:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_finite_losses_train_as_without_it_and_it_may_look_less_often(make_trainer: Any, loader: Any) -> None:
    def fitted(*callbacks: Any) -> Any:
        torch.manual_seed(1)
        module = Regression(dropout=0.1)
        make_trainer(callbacks=list(callbacks)).fit(module, loader)
        return module.state_dict()

    plain, watched = fitted(), fitted(TerminateOnNaN())
    assert all(torch.equal(value, watched[name]) for name, value in plain.items())
    with pytest.raises(NonFiniteLossError, match="batch 3 "):
        make_trainer(callbacks=TerminateOnNaN(3)).fit(Bad("parameter"), loader)
    with pytest.raises(ConfigurationError, match="every_n_batches"):
        TerminateOnNaN(0)


class WithoutNumber(Regression):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch) * float("nan")


def test_it_serves_a_step_that_takes_the_batch_alone(make_trainer: Any, loader: Any) -> None:
    with pytest.raises(NonFiniteLossError, match="all layers have finite outputs"):
        make_trainer(max_epochs=1, callbacks=TerminateOnNaN()).fit(WithoutNumber(), loader)
