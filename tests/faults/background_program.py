"""A fit of two ranks that saves in the background; one of them may die while it writes its part of the third save."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import FSDPStrategy

STRATEGY, DIES = sys.argv[1], int(sys.argv[2])


class Dies(AsyncCheckpointIO):
    saves = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.saves += 1
        self.dies = self.saves == 3 and int(os.environ["LOCAL_RANK"]) == DIES

    def write_records(self, path: Path, records: Any, **options: Any) -> Any:
        if getattr(self, "dies", False):
            os.write(1, b"the fault was injected\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_records(path, records, **options)


class BackgroundNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()

    def on_train_end(self) -> None:
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in self.parameters()]
        if self.global_rank == 0:
            os.write(1, f"weights {torch.cat([each.detach().flatten() for each in whole]).tolist()}\n".encode())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


if __name__ == "__main__":
    logging.getLogger("drivetrain").setLevel(logging.INFO)
    torch.manual_seed(1)
    chosen: Any = STRATEGY
    if STRATEGY == "fsdp":
        chosen = FSDPStrategy(state_dict_type="sharded", start_method="fork")
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=chosen, max_epochs=1, logger=False, plugins=[Dies()],
        callbacks=ModelCheckpoint("saved", every_n_train_steps=2, save_last="link"),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(32, 4))
    trainer.fit(BackgroundNet(), DataLoader(data, batch_size=2, shuffle=True), ckpt_path="last")
