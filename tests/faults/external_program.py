"""A fit of two ranks that drivetrain has not started, and nobody supervises; one may fail in a given phase."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer

WHERE, RANK = sys.argv[1], int(sys.argv[2])


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fails(Callback):
    def fail(self, trainer: Any, where: str) -> None:
        if (where, trainer.global_rank) == (WHERE, RANK):
            os.write(1, b"the fault was injected\n")
            raise ValueError("of this rank alone")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.fail(trainer, "set up")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.fail(trainer, "batch start")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (WHERE, trainer.global_rank, trainer.global_step) == ("save", RANK, 3):
            os.write(1, b"the fault was injected\n")
            trainer.save_checkpoint("alone.ckpt")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(job, TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    for rank in ("0", "1"):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = rank
        if os.fork() == 0:
            break
    else:
        os.wait()
        os.wait()
        sys.exit()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=Fails(),
    )  # fmt: skip
    try:
        trainer.fit(Model(), DataLoader(torch.ones(32, 4), batch_size=2))
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        text = str(error).replace("\n", " ")
        os.write(1, f"on rank {trainer.global_rank}: {type(error).__name__}; {notes}; {text}\n".encode())
    else:
        os.write(1, b"no error\n")
    os._exit(0)  # which closes its connections
