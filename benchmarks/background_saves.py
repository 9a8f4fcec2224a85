"""What a checkpoint costs training: saved at once, and in the background, against a copy of its state.

Run ``OMP_NUM_THREADS=1 python benchmarks/background_saves.py [--megabytes 1024] [--ranks 2]``. Each save follows sixty
steps and, in the same process, one copy of the state in ordinary memory. Printed are medians over the saves: the stall
as a multiple of the copy before it, in wall time and in processor time of the training thread, which other programs of
the machine disturb less; and the time of the ten steps after it as a multiple of that of the ten steps before it.
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
from torch import Tensor, nn

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.plugins import AsyncCheckpointIO

BETWEEN, SAVES = 60, 8
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
        self.folder, self.ends = folder, [time.perf_counter()]
        self.saves: list[list[float]] = []  # wall and processor time of the copy, then of the save
        self.copies: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())
        if batch_idx % BETWEEN == BETWEEN - 1:
            copy = timed(self.copy, [*pl_module.state_dict().values(), *states(trainer.optimizers[0])])
            save = timed(trainer.save_checkpoint, self.folder / f"{batch_idx // BETWEEN % 2}.ckpt")
            self.saves.append([*copy, *save])
            self.ends[-1] = time.perf_counter()

    def copy(self, tensors: list[Tensor]) -> None:
        self.copies = self.copies or [torch.empty_like(each) for each in tensors]
        for copied, each in zip(self.copies, tensors, strict=True):
            copied.copy_(each)


def states(optimizer: Any) -> list[Tensor]:
    return [each for state in optimizer.state.values() for each in state.values()]


def timed(function: Any, *args: Any) -> tuple[float, float]:
    began = time.perf_counter(), time.thread_time()
    function(*args)
    return time.perf_counter() - began[0], time.thread_time() - began[1]


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
        at = range(BETWEEN, len(steps) - 10, BETWEEN)
        saves = times.saves[2:]  # in the first two the system hands out the memory
        wall, cpu = (statistics.median(each[2 + at] / each[at] for each in saves) for at in (0, 1))
        stall, one = (statistics.median(each[at] for each in saves) for at in (2, 0))
        after = [sum(steps[each : each + 10]) / sum(steps[each - 11 : each - 1]) for each in at]
        print(
            f"{'background' if background else 'at once':>10}, {ranks} x {strategy}: "
            f"stall {stall:.3f} s, {wall:.2f} copies (each {one:.3f} s; in processor time {cpu:.2f}); "
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
