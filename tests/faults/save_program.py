"""A fit of two ranks with a callback that saves on exceptions; one rank may fail in its sixth step."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.strategies import FSDPStrategy, ModelParallelStrategy

FAULT, RANK, SAVER, FROM, OPTIMIZER, STRATEGY = [*sys.argv[1:], *["", "Adam", "ddp_fork"][len(sys.argv) - 4 :]]
AT = int(os.environ.get("SAVE_AT_STEP", "5"))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if FAULT != "none" and self.global_step == AT and self.global_rank == int(RANK):
            os.write(1, b"the fault was injected\n")
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("of this rank alone")
        loss = torch.nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()
        self.log("loss", loss)  # another value on each rank
        return loss

    def on_train_end(self) -> None:
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in self.parameters()]
        weights = torch.cat([each.detach().flatten() for each in whole])
        if self.global_rank == 0:
            os.write(1, f"weights {weights.tolist()}\n".encode())

    def configure_optimizers(self) -> Any:
        if OPTIMIZER == "sharded":
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.05)
        return torch.optim.Adam(self.parameters(), lr=0.05)


def strategy() -> Any:
    if STRATEGY == "ddp_fork":
        return STRATEGY
    chosen = ModelParallelStrategy if STRATEGY == "model_parallel" else FSDPStrategy
    options = {"tensor_parallel_size": 1} if STRATEGY == "model_parallel" else {}
    return chosen(auto_wrap_policy={torch.nn.Linear}, start_method="fork", **options)


if __name__ == "__main__":
    logging.getLogger("drivetrain").setLevel(logging.INFO)
    saver: Any = OnExceptionCheckpoint(".")
    if SAVER == "ModelCheckpoint":
        saver = ModelCheckpoint(".", filename=os.environ.get("SAVE_NAME"), save_on_exception=True, save_top_k=0)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), max_epochs=1, logger=False, callbacks=saver,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 4))
    trainer.fit(Model(), DataLoader(data, batch_size=2, shuffle=True), ckpt_path=FROM or None)
