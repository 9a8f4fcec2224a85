"""Handwritten digits: a convolutional classifier from data to test accuracy and curves. `make demo` runs it.

The data are the 1797 images of 8 x 8 pixels that ship inside scikit-learn, so nothing is downloaded. Training takes
some ten seconds on two CPU cores.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import LightningDataModule, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import LearningRateMonitor, ModelCheckpoint
from drivetrain.loggers import CSVLogger

matplotlib.use("Agg")  # draws into files, so no display is needed
from matplotlib import pyplot as plt

REQUIRED_ACCURACY = 0.97

Batch = tuple[Tensor, Tensor]  # images (B, 1, 8, 8) from 0 to 1, labels (B,)


class Digits(LightningDataModule):
    """The images, split into training, validation and test data: the same split for every run."""

    def __init__(self, batch_size: int = 64, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8); pixels are 0 to 16
        data = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(self.split_seed)
        self.train, self.val, self.test = random_split(data, [0.6, 0.2, 0.2], generator)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.batch_size)


class DigitClassifier(LightningModule):
    """Two convolutions, one hidden layer, ten classes."""

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 32, 4, 4)
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 64, 2, 2)
            nn.Flatten(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # (B, 10) logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, accuracy = self.judge(batch)
        self.log_dict({"val_loss": loss, "val_acc": accuracy}, prog_bar=True, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, accuracy = self.judge(batch)
        self.log_dict({"test_loss": loss, "test_acc": accuracy}, sync_dist=True)

    def judge(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy of one batch. `log` weighs them by the batch's size when it averages an epoch."""
        images, labels = batch
        logits = self(images)
        return F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).float().mean()

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}  # steps once per epoch


def read_curve(metrics_file: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged metric; a row in which it was not logged has an empty cell."""
    with metrics_file.open(newline="") as file:
        points = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(metrics_file: Path, image_file: Path, tested_step: int) -> None:
    """Loss and validation accuracy over training steps, side by side; the checkpoint that was tested is marked."""
    figure, (losses, accuracy) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    losses.plot(*read_curve(metrics_file, "train_loss"), label="training, one batch", alpha=0.6)
    losses.plot(*read_curve(metrics_file, "val_loss"), label="validation", marker="o", markersize=3)
    losses.set(xlabel="step", ylabel="cross-entropy (nats)", yscale="log")
    accuracy.plot(
        *read_curve(metrics_file, "val_acc"), label="validation", marker="o", markersize=3, color="tab:orange"
    )
    for axes in (losses, accuracy):
        axes.axvline(
            tested_step, color="tab:green", linewidth=1, label=f"checkpoint that was tested, step {tested_step}"
        )
    accuracy.axhline(REQUIRED_ACCURACY, linestyle=":", color="grey", label=f"required of the test: {REQUIRED_ACCURACY}")
    accuracy.set(xlabel="step", ylabel="accuracy")
    losses.legend()
    accuracy.legend(loc="lower right")
    figure.suptitle("Handwritten digits, 8 x 8 pixels: a convolutional classifier")
    figure.savefig(image_file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for logs, checkpoints, curves")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", default="auto", help="how many, or which: 2, 0,1")
    parser.add_argument("--strategy", default="auto", help="ddp, ddp_spawn, ...")
    arguments = parser.parse_args()

    seed_everything(arguments.seed)
    model, data = DigitClassifier(), Digits()
    logger = CSVLogger(arguments.output, name="digits")
    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = Trainer(
        accelerator="auto",
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_epochs=arguments.epochs,
        callbacks=[checkpoint, LearningRateMonitor()],
        logger=logger,
        log_every_n_steps=5,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data, ckpt_path="best")
    if not trainer.is_global_zero:
        return 0
    curves = arguments.output / "digits.png"
    tested_step = torch.load(checkpoint.best_model_path, weights_only=True)["global_step"]
    draw_curves(Path(logger.log_dir) / "metrics.csv", curves, tested_step)
    accuracy = result["test_acc"]
    print(f"Test accuracy:   {accuracy:.4f} (required: {REQUIRED_ACCURACY})")
    print(f"Best checkpoint: {checkpoint.best_model_path}")
    print(f"Curves:          {curves}")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
