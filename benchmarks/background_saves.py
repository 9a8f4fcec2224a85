"""What a checkpoint costs training: saved at once, and in the background, against a copy of its state.

Run ``python benchmarks/background_saves.py [--megabytes 1024] [--ranks 2]``. Each save follows sixty steps. Printed are
medians over the saves: the stall (what the step with the save takes more than its neighbours) as a multiple of one copy
of the state in memory, and the time of the ten steps after it as a multiple of that of the ten steps before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.plugins import AsyncCheckpointIO

BETWEEN, SAVES = 60, 6
WIDTH = 1024


class Net(LightningModule):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        layers = max(1, megabytes * 2**20 // (12 * WIDTH * WIDTH))  # 4 bytes of the weight, 8 of Adam's state
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), fused=True)


class Times(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.ends, self.stalls = folder, [time.perf_counter()], list[float]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())
        if batch_idx % BETWEEN == BETWEEN - 1:
            trainer.save_checkpoint(self.folder / f"{batch_idx % 2}.ckpt")
            self.stalls.append(time.perf_counter() - self.ends[-1])
            self.ends[-1] = time.perf_counter()


def copy_s(module: nn.Module, optimizer: Any) -> float:
    tensors = [*module.state_dict().values(), *(each for state in optimizer.state.values() for each in state.values())]
    copies, times = [torch.empty_like(each) for each in tensors], []
    for _ in range(4):
        began = time.perf_counter()
        for copied, each in zip(copies, tensors, strict=True):
            copied.copy_(each)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(background: bool, megabytes: int, ranks: int, strategy: str) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOLDER")) as folder:
        times, module = Times(Path(os.environ.get("SHARED", folder))), Net(megabytes)
        batches = [torch.randn(16, WIDTH)] * (BETWEEN * (SAVES + 1) - 1)
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", devices=ranks, strategy=strategy, logger=False, callbacks=[times],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            plugins=[AsyncCheckpointIO()] if background else [],
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        if not trainer.is_global_zero:
            return
        steps = [later - earlier for earlier, later in zip(times.ends, times.ends[1:], strict=False)]
        one = copy_s(module, trainer.optimizers[0])
        at = range(BETWEEN, len(steps) - 10, BETWEEN)
        stall = statistics.median(times.stalls[1:])
        after = [sum(steps[each : each + 10]) / sum(steps[each - 11 : each - 1]) for each in at]
        print(
            f"{'background' if background else 'at once':>10}, {ranks} x {strategy}: "
            f"stall {stall:.3f} s, {stall / one:.2f} copies (each {one:.3f} s); "
            f"ten steps after {statistics.median(after[1:]):.3f} of ten before "
            f"({10 * statistics.median(steps):.2f} s)"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--only", choices=["background", "at once"])
    options = parser.parse_args()
    if options.only:
        measure(options.only == "background", options.megabytes, options.ranks, options.strategy)
        return
    for only in ("at once", "background"):
        subprocess.run([sys.executable, *sys.argv, "--only", only], check=True)


if __name__ == "__main__":
    main()
