"""A program that torchrun may restart at any time on other machines: ``torchrun ... elastic.py FOLDER``.

It does nothing about that itself: with ``DRIVETRAIN_RESUME=auto``, each start resumes from the newest checkpoint. While
it trains, every process writes the samples of each batch into ``<start>-<rank>-of-<ranks>.jsonl``, and waits after each
step until there is a file ``hurry``. A rank waits ``EXCHANGE_TIMEOUT_S`` seconds for the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import GoodputMonitor, ModelCheckpoint
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import DDPStrategy

SAMPLES, BATCH, EPOCHS = 47, 10, 40  # neither two nor three processes divide a batch


class Numbered(LightningModule):
    """Learns from numbered samples, and writes down which ones it was given."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), folder

    def on_train_start(self) -> None:
        start, trainer = self.trainer.strategy.broadcast(time.time_ns()), self.trainer
        self.path = self.folder / f"{start}-{trainer.global_rank}-of-{trainer.world_size}.jsonl"

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y, number = batch
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, number.tolist()]) + "\n")
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not (self.folder / "hurry").exists():
            time.sleep(0.2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main(folder: Path) -> None:
    seed_everything(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=DDPStrategy(timeout=timedelta(seconds=float(os.environ.get("EXCHANGE_TIMEOUT_S", 1800)))),
        precision="64-true",
        split_batches=True,
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[GoodputMonitor(), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Numbered(folder)
    trainer.fit(model, DataLoader(data, BATCH, shuffle=True))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    (folder / f"weights{trainer.global_rank}.json").write_text(json.dumps(weights.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
