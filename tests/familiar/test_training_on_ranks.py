"""Training on several processes as programs written for Lightning expect it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer


class Sees(LightningModule):
    """Logs its rank's own number in each step, and keeps what callbacks would see then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[float] = []
        self.modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("value", float(10 * batch_idx + self.global_rank), sync_dist=True)
        return self.layer(batch[0]).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["value"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(self.trainer.model.training)

    def on_train_epoch_end(self) -> None:
        self.modes.append(self.trainer.model.training)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder: Path) -> tuple[list[float], list[bool]]:
    warnings.filterwarnings("ignore", "All ranks have trained on the same batch")
    model, loader = Sees(), DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
    Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, log_every_n_steps=2, default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=1, num_sanity_val_steps=0,
    ).fit(model, loader, loader)  # fmt: skip
    return model.seen, model.modes


def test_a_shared_value_and_the_mode_of_the_wrapped_model(pool: Any, tmp_path: Path) -> None:
    (first, modes), (second, other_modes) = pool.run(fitted, tmp_path, group=False)
    # Before the ranks have exchanged a value each sees its own, and from then on the mean of the last exchange.
    assert first == [0.0, 10.0, 10.5, 10.5]
    assert second == [1.0, 11.0, 10.5, 10.5]
    assert modes == other_modes == [False, True]  # while validating, and after it
