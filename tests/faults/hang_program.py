"""A fit of two ranks in which rank 1 does not come to a collective; how it is started, and what rank 1 does, varies.

With a fourth argument, "function" or "program", it is no fit but such a program that drives an Engine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.cli.command import main as drivetrain

STRATEGY, FAULT, STALL_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
AT_MOST_S = 60.0


def wait_for_message() -> None:
    """The event that this waits for is the message, which names a file."""
    deadline = time.monotonic() + AT_MOST_S
    while not any("waits in collective" in each.read_text() for each in Path.cwd().glob("stalled-*.txt")):
        assert time.monotonic() < deadline, "no message"
        time.sleep(0.05)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.trainer.global_rank == 1:
            os.write(1, b"the fault was injected\n")
            self.fault()
        return self.layer(batch).square().mean()

    @staticmethod
    def fault() -> None:
        if FAULT == "late":
            wait_for_message()
            for job in (".", str(os.getpid())):
                assert drivetrain(["stacks", job]) == 0
            assert drivetrain(["stacks", "nowhere"]) == 2
        if FAULT == "launcher killed":
            os.kill(os.getppid(), signal.SIGKILL)
        if FAULT in ("other collective", "launcher killed"):
            torch.distributed.barrier()
        if FAULT == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "exception":
            raise ValueError("of this rank alone")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def start_as_torchrun_does() -> list[int]:
    """Make two ranks of this process and its copies; return their processes, in the process that waits for them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(job, TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            return []
        children.append(child)
    return children


def drive(form: str) -> None:
    strategy = "ddp" if STRATEGY == "torchrun" else STRATEGY
    engine = Engine(accelerator="cpu", devices=2, strategy=strategy)
    engine.stall_timeout_s = STALL_S
    if form == "program":
        engine.launch()
        exchange(engine)
        return
    try:
        engine.launch(exchange)
    except ValueError:
        if FAULT != "exception" or STRATEGY == "ddp_fork":
            raise
        time.sleep(AT_MOST_S)  # the process lives on, until the launcher ends it


def exchange(engine: Any) -> None:
    for step in range(5):
        if step == 3 and engine.global_rank == 1:
            os.write(1, b"the fault was injected\n")
            Model.fault()
        engine.all_reduce(torch.ones(1))


def fit() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp" if STRATEGY == "torchrun" else STRATEGY, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        stall_timeout_s=STALL_S,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(torch.ones(16, 4), batch_size=1))


if __name__ == "__main__":
    children = start_as_torchrun_does() if STRATEGY == "torchrun" else []
    if children:
        for child in children:
            print(f"rank ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
    else:
        drive(sys.argv[4]) if len(sys.argv) > 4 else fit()
        os.write(1, b"trained\n")
