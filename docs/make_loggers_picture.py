"""Writes docs/loggers.svg: the curves of a fit that is cut off and of the fit that resumes it, from their tables."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import torch
from chart import Curve, chart
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger

PICTURE = Path(__file__).parent / "loggers.svg"


class Model(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)


def curves() -> list[list[tuple[float, float]]]:
    """Return the points of both fits."""
    seed_everything(1)
    x = torch.randn(1600, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True) + 0.5 * torch.randn(1600, 1))
    points = []
    with tempfile.TemporaryDirectory() as folder:
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=100, save_top_k=-1)
        for steps, path in ((250, None), (400, f"{folder}/step=200.ckpt")):
            logger = CSVLogger(folder)
            trainer = Trainer(
                accelerator="cpu", max_steps=steps, logger=logger, callbacks=[saves], log_every_n_steps=5,
                enable_progress_bar=False, enable_model_summary=False, deterministic=True,
            )  # fmt: skip
            trainer.fit(Model(), DataLoader(data, batch_size=16, shuffle=True), ckpt_path=path)
            with open(logger.metrics_file_path, encoding="utf-8") as file:
                points.append([(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]])
    return points


def picture(points: list[list[tuple[float, float]]]) -> str:
    """Return the curves, the second one over the first."""
    cut, resumed = points
    return chart(
        [
            Curve("the first fit, cut off at step 250", cut, "#c98a3c", 5),
            Curve("the fit resumed at step 200", resumed, "#4878a8"),
        ],
        "step", "loss", range(0, 401, 100),
    )  # fmt: skip


if __name__ == "__main__":
    PICTURE.write_text(picture(curves()), encoding="utf-8")
