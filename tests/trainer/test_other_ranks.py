"""At the end of an epoch, another number of processes resumes with what the ranks have agreed on, or is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.errors import CheckpointError


class Net(LightningModule):
    """By hand it steps after every second batch, so that a window of epochs of three reaches over an epoch's end."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.automatic_optimization = nn.Linear(4, 1), not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if (batch_idx + self.current_epoch) % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        if not self.automatic_optimization:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def fitted(by_hand: bool, saves: Path | None = None, resumes: Path | None = None) -> tuple[Tensor, int, float]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(36, 4, generator=generator), torch.randn(36, 1, generator=generator))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", precision="64-true", max_epochs=3,
        split_batches=ranks > 1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Saves(saves)] if saves else [],
    )  # fmt: skip
    trainer.fit(module := Net(by_hand), DataLoader(data, batch_size=12), ckpt_path=resumes)
    [group] = trainer.optimizers[0].param_groups
    return nn.utils.parameters_to_vector(module.parameters()).detach(), trainer.global_step, group["lr"]


def saved(pool: Any, by_hand: bool, path: Path) -> Path:
    pool.run(fitted, by_hand, path, world_size=3, group=False)
    return path


def test_a_scheduler_that_watches_the_epoch_that_ends_goes_on(pool: Any, tmp_path: Path) -> None:
    path, (expected, *counted) = saved(pool, False, tmp_path / "a.ckpt"), fitted(False)
    for found, *counts in [*pool.run(fitted, False, None, path, group=False), fitted(False, None, path)]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert counts == counted


def test_a_window_that_reaches_over_the_end_of_an_epoch_is_refused(pool: Any, tmp_path: Path) -> None:
    path, (expected, *_) = saved(pool, True, tmp_path / "a.ckpt"), fitted(True)
    with pytest.raises(CheckpointError, match="saved by 3 processes inside a window.*and there are 1"):
        fitted(True, None, path)
    for found, *_ in pool.run(fitted, True, None, path, world_size=3, group=False):  # the control
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
