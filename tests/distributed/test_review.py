"""Ranks that part in silence, and what one Trainer leaves to the next: each of these has happened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer


def trainer(**arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def loader(count: int, batch_size: int = 1) -> Any:
    return DataLoader(TensorDataset(torch.arange(float(count))[:, None].expand(-1, 2).clone()), batch_size=batch_size)


class Net(LightningModule):
    def __init__(self, on_rank_zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.on_rank_zero = on_rank_zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean() * 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Logs(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("all", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        if self.on_rank_zero and self.global_rank == 0:
            self.log("mine", batch[0].mean(), on_step=True)


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def validated(count: int, on_rank_zero: bool) -> float:
    [result] = trainer().validate(Logs(on_rank_zero), loader(count), verbose=False)
    return result["all_epoch"]


@pytest.mark.parametrize(
    ("count", "on_rank_zero"), [(125, False), (127, False), (128, False), (129, False), (140, True)]
)
def test_values_of_each_evaluation_batch_are_exchanged_at_the_same_batches(
    pool: Any, count: int, on_rank_zero: bool
) -> None:
    """A rank that repeats its last batch, or logs more than another, has another number of values."""
    expected = (count - 1) / 2
    assert pool.run(validated, count, on_rank_zero) == [pytest.approx(expected)] * 2


class Prepares(Net):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def prepare_data(self) -> None:
        threading.Event().wait(0.5)
        self.path.touch()

    def setup(self, stage: str) -> None:
        self.there = self.path.exists()


def prepared(folder: Path) -> list[bool]:
    there = []
    for number in range(3):
        module = Prepares(folder / str(number))
        trainer().fit(module, loader(4))
        there.append(module.there)
    return there


def test_t41_every_trainer_of_a_job_waits_for_its_own_data(pool: Any, tmp_path: Path) -> None:
    assert pool.run(prepared, tmp_path) == [[True] * 3] * 2


class Plateau(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", float(self.current_epoch * (-1) ** self.global_rank))  # worse on rank 0, better on rank 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "value"}}


def flattened() -> tuple[float, torch.Tensor]:
    module, ours = Plateau(), trainer(max_epochs=4)
    ours.fit(module, loader(8), loader(2))
    return ours.optimizers[0].param_groups[0]["lr"], weights(module)


def test_t5_learning_rates_follow_rank_zeros_value(pool: Any) -> None:
    (first, ours), (second, theirs) = pool.run(flattened)
    assert first == second < 0.1
    assert torch.equal(ours, theirs)


class Thaws(Net):
    """Trains its head, and from the second epoch on its body."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(True)


def thawed() -> torch.Tensor:
    module = Thaws()
    before = module.body.weight.clone()
    trainer(max_epochs=3).fit(module, loader(8))
    assert not torch.equal(before, module.body.weight)
    return weights(module)


def test_layers_that_thaw_in_a_fit_are_averaged(pool: Any) -> None:
    [alone] = pool.run(thawed_alone, world_size=1)
    for found in pool.run(thawed):
        torch.testing.assert_close(found, alone)


def thawed_alone() -> torch.Tensor:
    module = Thaws()
    trainer(devices=1, max_epochs=3).fit(module, loader(8, batch_size=2))
    return weights(module)
