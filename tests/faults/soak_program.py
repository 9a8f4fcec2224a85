"""A training whose process is killed at random and started again until it has ended, by a process that stays.

``python soak_program.py FOLDER STEPS MEAN_S KILLS SEED``: MEAN_S seconds pass between two kills on average, after an
exponential distribution; with a negative number, they count from when the process begins to train. After KILLS kills
the training runs on undisturbed. A process that was started again is a copy of this one, which has imported everything
already. A line of the output is JSON: the number of kills, the seconds from the first start to the end, a digest of the
weights, and the training's use of memory (KiB), descriptors and threads after a tenth of the steps and after the last
step. Five more arguments are another training. The variable SOAK_WIDTH is the width of the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they are made
from torch.utils.data import DataLoader, TensorDataset

import drivetrain.callbacks.goodput_monitor
import drivetrain.checkpoints.plain
import drivetrain.compat.earlier_checkpoints
import drivetrain.loops.fit  # noqa: F401
from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint

WIDTH = int(os.environ.get("SOAK_WIDTH", "32"))


class Net(LightningModule):
    def __init__(self, watched_at: tuple[int, int], says: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
        self.watched_at, self.says, self.used = watched_at, says, list[list[int]]()

    def on_train_start(self) -> None:
        os.write(self.says, b"trains")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step in self.watched_at:
            self.used.append(used())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def used() -> list[int]:
    """The resident memory of this process in KiB, its descriptors and its threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd")), threading.active_count()]


def train(folder: str, steps: int, says: int) -> None:
    seed_everything(3)
    x = torch.randn(6400, 4, generator=torch.Generator().manual_seed(1))
    saver = ModelCheckpoint(folder, every="auto")
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=saver,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 64, shuffle=True)
    module = Net((steps // 10, steps), says)
    trainer.fit(module, loader, ckpt_path="last")
    weights = torch.cat([each.detach().flatten() for each in module.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    result = {"weights": digest, "steps": trainer.global_step, "used": module.used}
    Path(folder, "result.json").write_text(json.dumps(result))


def main(folder: str, steps: int, mean_s: float, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    Trainer(accelerator="cpu", logger=False)  # imports what each run would import
    draw, began, killed = random.Random(seed), time.time(), 0
    from_training, mean_s = mean_s < 0, abs(mean_s)
    next_kill = time.monotonic() + draw.expovariate(1 / mean_s)
    while True:
        trains, says = os.pipe()
        if (pid := os.fork()) == 0:
            train(folder, steps, says)
            os._exit(0)
        fd = os.pidfd_open(pid)  # readable when the process ends
        if from_training:
            select.select([trains, fd], [], [])
            next_kill = time.monotonic() + draw.expovariate(1 / mean_s)
        left_s = max(0.0, next_kill - time.monotonic()) if killed < kills else None
        if not select.select([fd], [], [], left_s)[0]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
            next_kill = time.monotonic() + draw.expovariate(1 / mean_s)
        for each in (fd, trains, says):
            os.close(each)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            break
    if status:
        sys.exit(f"the training ended with exit code {status}")
    result = json.loads(Path(folder, "result.json").read_text())
    print(json.dumps({"kills": killed, "wall_s": time.time() - began, **result}), flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    for at in range(0, len(words), 5):
        main(words[at], int(words[at + 1]), float(words[at + 2]), int(words[at + 3]), int(words[at + 4]))
