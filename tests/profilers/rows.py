"""What the tests of profilers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer


class Model(LightningModule):
    """One layer; an action of its own in the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("my forward"):
            return self.layer(batch[0]).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Model):
    """The same, and it validates."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])


def loader(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches, 2)), batch_size=1)


def trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})
