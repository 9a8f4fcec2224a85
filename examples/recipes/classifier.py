"""An image classifier whose weights are averaged (EMA), tested with the best checkpoint. Ten seconds."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import EMAWeightAveraging, ModelCheckpoint


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def accuracy(self, batch: list[Tensor], name: str) -> None:
        images, labels = batch
        right = self.net(images).argmax(1) == labels
        self.log(name, right.double().mean(), prog_bar=True, sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(batch, "val_acc")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(batch, "test_acc")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(output: str, epochs: int) -> float:
    """Train, and return the accuracy on the test images."""
    seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target))
    train, val, test = random_split(data, [0.7, 0.15, 0.15])

    best = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = Trainer(max_epochs=epochs, callbacks=[best, EMAWeightAveraging(decay=0.99)], default_root_dir=output)
    trainer.fit(Classifier(), DataLoader(train, 32, shuffle=True), DataLoader(val, 128))
    [result] = trainer.test(dataloaders=DataLoader(test, 128), ckpt_path="best")
    print(f"Accuracy of {best.best_model_path}: {result['test_acc']:.3f}")
    return result["test_acc"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    main(options.output, options.epochs)
