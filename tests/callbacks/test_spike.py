from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression

from drivetrain.callbacks import SpikeDetection
from drivetrain.callbacks.spike import TrainingSpikeException
from drivetrain.errors import ConfigurationError


class Losses(Regression):
    """Has the losses that it is given, one after the other."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss - loss.detach() + self.losses[self.global_step]


@pytest.mark.parametrize(
    ("losses", "arguments", "batch"),
    [
        ([1.0, 1.1, 5.0, 1.0], {}, 2),
        ([1.0, 1.1, 2.5, 1.0], {}, None),
        ([1.0, 1.1, 2.5, 1.0], {"rtol": 0.5}, 2),
        ([1.0, 9.0, 9.0, 9.0], {"warmup": 2}, None),
        ([1.0, 1.0, float("nan"), 1.0], {}, 2),
        ([1.0, 1.0, float("inf"), 1.0], {"finite_only": False}, None),
        ([5.0, 5.0, 5.0, 0.1], {"mode": "max", "rtol": 0.5}, 3),
        ([5.0, 5.0, 5.0, 50.0], {"mode": "max", "rtol": 0.5}, None),
        ([1.0, 9.0, 1.0, 1.0], {"rtol": None, "atol": 10.0}, None),
        ([9.0, 1.0, 1.0, 4.5], {"window": 2}, 3),
        ([9.0, 1.0, 1.0, 4.5], {"window": 3}, None),
        ([float("nan"), 1.0, 1.0, 1.0], {"warmup": 0}, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nan:UserWarning", "ignore:.*not finite:UserWarning")
def test_which_losses_are_spikes(
    make_trainer: Any, loader: Any, tmp_path: Path, losses: list[float], arguments: Any, batch: int | None
) -> None:
    detection = SpikeDetection(**arguments)
    trainer = make_trainer(callbacks=detection)
    if batch is None:
        trainer.fit(Losses(losses), loader)
        assert not (tmp_path / "skip_batches.json").exists()
        return
    with pytest.raises(TrainingSpikeException, match=f"loss of batch {batch} in epoch 0 jumped") as caught:
        trainer.fit(Losses(losses), loader)
    assert caught.value.batch_idx == batch
    expected = [batch] if batch == 0 else [batch - 1, batch]
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == detection.bad_batches == expected


def test_a_resumed_run_continues_with_the_mean_and_the_list(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    first = SpikeDetection()
    trainer = make_trainer(callbacks=first)
    trainer.fit(Losses([2.0, 1.0, 1.0, 1.0]), loader)
    first.bad_batches.append(7)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = SpikeDetection(exclude_batches_path=tmp_path / "own.json")
    losses = [0.0] * 4 + [3.8, 1.0, 1.0, 1.0]  # a mean of 1.25, and the first losses of a new run would be a warmup
    with pytest.raises(TrainingSpikeException):
        make_trainer(callbacks=resumed, max_epochs=2).fit(Losses(losses), loader, ckpt_path=tmp_path / "one.ckpt")
    assert json.loads((tmp_path / "own.json").read_text()) == [7, 0]


def test_what_it_refuses() -> None:
    for arguments in [{"mode": "x"}, {"window": 0}, {"warmup": -1}, {"rtol": "x"}]:
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            SpikeDetection(**arguments)
    assert issubclass(TrainingSpikeException, RuntimeError)
    assert torch.is_tensor(torch.ones(1))


def test_it_says_that_a_manual_step_returns_no_loss(make_trainer: Any, loader: Any) -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    with pytest.warns(UserWarning, match="SpikeDetection sees no loss: Manual optimizes manually"):
        make_trainer(max_epochs=1, callbacks=SpikeDetection()).fit(Manual(), loader)
