"""A run that is killed at any moment leaves a whole checkpoint behind, and its resumption ends where it would have."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError

# Imports torch once; each line of its input is a run in a process of its own: a folder and a number of steps.
PROGRAM = """
import json, os, sys
import torch
import torch._dynamo  # optimizers import it when they are made
import drivetrain.loops.fit, drivetrain.checkpoints.plain, drivetrain.compat.earlier_checkpoints
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint


def say(what):
    os.write(1, (json.dumps(what) + "\\n").encode())  # one write: a line is there whole, or not at all


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 256), torch.nn.Dropout(0.5), torch.nn.Linear(256, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        say({"step": self.global_step})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def run(folder, steps):
    seed_everything(3)
    x = torch.randn(70, 4, generator=torch.Generator().manual_seed(1))
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=checkpoint, enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path="last")
    weights = torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()])
    say({"steps": trainer.global_step, "weights": weights.tolist()})


for line in sys.stdin:
    folder, steps = json.loads(line)
    if (pid := os.fork()) == 0:
        run(folder, steps)
        os._exit(0)
    say({"pid": pid})
    say({"ended": os.waitpid(pid, 0)[1]})
"""


class Runs:
    """The program, and what it says."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, folder: Path, steps: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), steps]) + "\n")
        self.process.stdin.flush()
        pid: int = next(said["pid"] for said in self.said() if "pid" in said)
        return pid

    def said(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def finish(self, folder: Path, steps: int) -> dict[str, Any]:
        self.start(folder, steps)
        return next(said for said in self.said() if "weights" in said or said.get("ended"))


@pytest.fixture
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.process.kill()
    runs.process.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL, which are POSIX")
def test_killed_at_random_moments_it_always_finds_a_whole_checkpoint(
    runs: Runs, tmp_path: Path, long_form: bool
) -> None:
    kills = 100 if long_form else 20
    folder, moments = tmp_path / "killed", random.Random(0)
    durable = 0
    for _ in range(kills):
        pid = runs.start(folder, 10**6)
        wanted, reached = moments.randint(1, 4), 0
        for said in runs.said():
            assert "ended" not in said, "the run ended by itself"
            wanted -= 1
            if wanted <= 0:
                reached = said["step"]
                break
        time.sleep(moments.random() * 0.01)  # into whatever it is doing: the step, the save, the rename, the removal
        os.kill(pid, signal.SIGKILL)
        assert next(said["ended"] for said in runs.said() if "ended" in said) == signal.SIGKILL
        # All are whole: their checksums are verified. The next run takes the newest, which last.ckpt is a moment later.
        newest = max(TorchCheckpointIO().load_checkpoint(path)["global_step"] for path in folder.glob("*.ckpt"))
        assert newest >= max(durable, reached - 1)  # a step is reported before it is saved
        durable = newest

    found = runs.finish(folder, durable + 3)
    assert found["steps"] == durable + 3 > kills
    assert found == runs.finish(tmp_path / "whole", durable + 3)


def test_a_checkpoint_that_was_cut_short_is_not_whole(tmp_path: Path) -> None:
    """The negative control: what the loop above would see if a save were not atomic."""
    path = tmp_path / "a.ckpt"
    TorchCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(1000)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        TorchCheckpointIO().load_checkpoint(path)
