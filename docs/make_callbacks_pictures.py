"""Writes docs/lr_find.svg, the losses of a learning rate finder, and docs/averages.svg, those of averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from chart import Curve, chart
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import EMAWeightAveraging
from drivetrain.tuner import Tuner

FOLDER = Path(__file__).parent
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "deterministic": True,
}  # fmt: skip


class Model(LightningModule):
    """A small network; it keeps the loss of each validation."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[tuple[float, float]] = []

    def _loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.losses.append((self.trainer.global_step, float(self.trainer.callback_metrics["val_loss"])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loaders(batch_size: int = 8) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a training and a validation loader of the same noisy function."""
    x = torch.randn(4000, 8)
    y = x.sin().sum(1, keepdim=True) + torch.randn(4000, 1)
    train, val = TensorDataset(x[:3200], y[:3200]), TensorDataset(x[3200:], y[3200:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=800)


def lr_find() -> str:
    """Return the smoothed losses of a finder, with a dot at what it suggests."""
    seed_everything(1)
    sweep = Tuner(Trainer(**QUIET)).lr_find(Model(0.1), loaders(800)[0], min_lr=1e-4, num_training=200)
    assert sweep is not None
    found = sweep.suggestion()
    points = list(zip(sweep.results["lr"], sweep.results["loss"], strict=True))
    points = [point for point in points if point[1] <= 1.5 * points[0][1]]
    marked = [point for point in points if point[0] == found]
    return chart(
        [
            Curve("loss at each learning rate", points, "#4878a8"),
            Curve(f"suggestion: {found:.2g}", marked, "#c23b3b", 5, dots=True),
        ],
        "learning rate", "smoothed loss", [1e-4, 1e-3, 1e-2, 1e-1, 1], logarithmic=True,
    )  # fmt: skip


def averages() -> str:
    """Return the validation losses of the trained weights, and of their average."""
    curves = []
    for callbacks in ([], [EMAWeightAveraging(decay=0.99)]):
        seed_everything(1)
        model, (train, val) = Model(0.2), loaders()
        arguments = {"max_steps": 1600, "val_check_interval": 20, "check_val_every_n_epoch": None}
        Trainer(**QUIET, **arguments, num_sanity_val_steps=0, callbacks=callbacks).fit(model, train, val)
        curves.append(model.losses)
    return chart(
        [
            Curve("the trained weights", curves[0], "#c98a3c"),
            Curve("EMAWeightAveraging(decay=0.99)", curves[1], "#4878a8"),
        ],
        "step", "validation loss", range(0, 1601, 400),
    )  # fmt: skip


if __name__ == "__main__":
    (FOLDER / "lr_find.svg").write_text(lr_find(), encoding="utf-8")
    (FOLDER / "averages.svg").write_text(averages(), encoding="utf-8")
