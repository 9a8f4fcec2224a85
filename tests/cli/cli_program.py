"""A user's train.py: the tests run it as a program, and import its classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningDataModule, LightningModule
from drivetrain.cli import LightningCLI


class Net(LightningModule):
    """Two layers.

    Args:
        width: units of the hidden layer.
        lr: the learning rate.
    """

    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.width, self.lr = width, lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class CliDeep(Net):
    """The same, under another name, with one more argument."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__(width)
        self.depth = depth


class Bare(Net):
    """A model that leaves its optimizer to the command line."""

    configure_optimizers = LightningModule.configure_optimizers


class Data(LightningDataModule):
    """Sums of four numbers, in batches."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _loader(self) -> DataLoader[Any]:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


if __name__ == "__main__":
    LightningCLI(Net, Data)
