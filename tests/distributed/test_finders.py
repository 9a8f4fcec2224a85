"""Finders with several ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed.sharded import token_data, whole
from tests.distributed.test_fsdp import Net, trainer
from torch.utils.data import DataLoader

from drivetrain.callbacks import BatchSizeFinder, LearningRateFinder
from drivetrain.errors import ConfigurationError


class Tuned(Net):
    lr = 0.01
    batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def fitted(ranks: int, kind: str, finds: bool = True, rate: float = 0.01) -> Any:
    module, finder = Tuned(), LearningRateFinder(min_lr=1e-4, num_training_steps=20)
    module.lr = rate
    ours = trainer(ranks, kind, callbacks=[finder] if finds else [], max_epochs=1)
    ours.fit(module, DataLoader(token_data(40), batch_size=8 // ranks))
    weights = {name: whole(value).detach().clone() for name, value in module.state_dict().items()}
    return module.lr, None if finder.optimal_lr is None else finder.optimal_lr.results, weights


@functools.cache
def alone() -> Any:
    return fitted(1, "ddp")


def found_and_given(kind: str) -> Any:
    rate, results, weights = fitted(2, kind)
    return rate, results, weights, fitted(2, kind, False, rate)[2]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_find_the_learning_rate_of_one_process_and_leave_no_trace(pool: Any, kind: str) -> None:
    for rate, results, weights, given in pool.run(found_and_given, kind, group=False):
        assert rate == pytest.approx(alone()[0])
        assert results["loss"] == pytest.approx(alone()[1]["loss"])
        torch.testing.assert_close(weights, given, rtol=0, atol=0)


def refused() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(2, "ddp", callbacks=[BatchSizeFinder()]).fit(Tuned(), DataLoader(token_data(8), batch_size=4))
    return str(caught.value)


def test_the_batch_size_is_found_with_one_process_only(pool: Any) -> None:
    for message in pool.run(refused, group=False):
        assert "BatchSizeFinder works with one process, and there are 2" in message
