"""A fit of several ranks in which one of them fails, in a given way and a given phase.

Each rank writes its process's number, and the one that fails writes when.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, LightningModule, Trainer

STRATEGY, FAULT, PHASE, RANK, SIZE = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
STEP = 5
WORKERS = int(os.environ.get("FAULT_WORKERS", "0"))
LAUNCHER_DIES_S = os.environ.get("FAULT_LAUNCHER_DIES_S", "")  # after the program has begun

_failed: list[bool] = []


def say_process() -> None:
    os.write(1, f"process {os.getpid()}\n".encode())


def fail() -> None:
    if _failed:  # and was asked to end, which it does later
        return
    _failed.append(True)
    os.write(1, f"the fault was injected at {time.monotonic()}\n".encode())
    if FAULT == "exception":
        raise ValueError("of this rank alone")
    if FAULT == "no memory":
        raise MemoryError("of this rank alone")
    if FAULT == "sys.exit":
        sys.exit(7)
    if FAULT in ("SIGTERM", "SIGINT"):
        signal.raise_signal(signal.Signals[FAULT])
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "exit":
        os._exit(8)
    if FAULT == "segfault":
        ctypes.string_at(0)
    if FAULT == "abort":
        os.abort()
    if FAULT == "hang and die":
        time.sleep(1)
        os._exit(9)


if "RANK" in os.environ:  # a copy of the launching process has it only later
    say_process()
    if PHASE == "import" and int(os.environ["RANK"]) == RANK:
        fail()


class Data(Dataset[Any]):
    def __init__(self, module: Any) -> None:
        self.module = module

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.module.at("data")
        if FAULT == "kill worker" and index > 20 and self.module.trainer.global_rank == RANK:  # some batches have come
            os.write(1, b"the fault was injected\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def at(self, phase: str) -> None:
        trainer = self.trainer
        late = phase in ("setup", "load", "teardown") or (trainer.global_step == STEP and not trainer.sanity_checking)
        if phase == PHASE and late and trainer.global_rank == RANK:
            fail()

    def setup(self, stage: str) -> None:
        if STRATEGY == "ddp_fork":
            say_process()
        self.at("setup")

    def on_train_start(self) -> None:
        """Let the flush of the log fail; a logger of the user's cannot end a fit."""
        book = self.trainer.logbook
        agree = book.agree_on_steps

        def agree_on_steps(rows: Any) -> Any:
            self.at("log flush")
            return agree(rows)

        book.agree_on_steps = agree_on_steps

    def teardown(self, stage: str) -> None:
        self.at("teardown")

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.at("load")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("checkpoint")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.at("forward")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_backward(self, loss: Any) -> None:
        self.at("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("optimizer step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation")

    def train_dataloader(self) -> Any:
        return DataLoader(Data(self), batch_size=2, num_workers=WORKERS)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 4), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saves(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEP and PHASE == "checkpoint":
            trainer.save_checkpoint("now.ckpt")


def die_as_launcher() -> None:
    time.sleep(float(LAUNCHER_DIES_S))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if LAUNCHER_DIES_S and "LOCAL_RANK" not in os.environ:
        threading.Thread(target=die_as_launcher, daemon=True).start()
    trainer = Trainer(
        accelerator="cpu", devices=SIZE, strategy="ddp" if STRATEGY == "torchrun" else STRATEGY,
        max_epochs=10_000 if LAUNCHER_DIES_S else 1, val_check_interval=STEP, log_every_n_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=Saves(),
        stall_timeout_s=1 if FAULT == "stop" else 300,
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path="start.ckpt" if PHASE == "load" else None)
