"""A run whose source is the same under both libraries; the environment says which one it is."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NAME = os.environ.get("INTEROP_LIBRARY", "drivetrain")
library = importlib.import_module(NAME)
callbacks = importlib.import_module(f"{NAME}.callbacks")


class Net(library.LightningModule):  # type: ignore[name-defined, misc]
    """No dropout and no shuffling: what follows from a checkpoint follows from nothing else."""

    def __init__(
        self,
        width: int = 8,
        lr: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.99),
        manual: bool = False,
        **more: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=self.hparams.betas)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        by_step = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=10)
        return [optimizer], [
            {"scheduler": by_epoch, "interval": "epoch"},
            {"scheduler": by_step, "interval": "step"},
        ]


def loader() -> DataLoader[Any]:
    """Six batches of eight, in their order."""
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)


def trainer(folder: Path, epochs: int = 4, checkpoints: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """It saves every epoch and whatever else ``checkpoints``, arguments of a ModelCheckpoint, ask for."""
    kept = {"dirpath": folder, "filename": "{epoch}-{step}", "save_top_k": -1, "monitor": "val_loss"}
    return library.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            callbacks.ModelCheckpoint(**{**kept, **(checkpoints or {})}),
            callbacks.EarlyStopping("val_loss", patience=50),
            callbacks.Timer("00:01:00:00"),
        ],
        **arguments,
    )


def state(trainer: Any, net: Any) -> dict[str, Any]:
    """What two runs are compared by."""
    return {
        "weights": dict(net.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "stopping": (trainer.early_stopping_callback.wait_count, float(trainer.early_stopping_callback.best_score)),
        "best": trainer.checkpoint_callback.best_model_path,
    }
