"""What a checkpoint of a model on a GPU costs training: saved at once, and in the background.

Each save follows 600 steps, in which the one before is written. Printed are medians over the saves: the stall (how
long the call that saves takes) and its parts, beside one copy of the state from the device to pinned memory, and the
time of the ten steps after it as a multiple of that of the ten steps before it. The parts are: "dump", collecting the
state; "plan", finding its tensors and their places in memory; "fill", copying. The device is waited for after each
step, so that a step's time is its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.checkpoints.arena import Arena
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.trainer import checkpoint

BETWEEN, SAVES, WIDTH = 600, 5, 2048


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
        torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        if batch_idx % BETWEEN == BETWEEN - 1:
            trainer.save_checkpoint(self.folder / f"{batch_idx % 2}.ckpt")
            torch.accelerator.synchronize()
            self.stalls.append(time.perf_counter() - self.ends[-1])
            self.ends[-1] = time.perf_counter()


def timed(owner: Any, name: str) -> list[float]:
    """Let each later call of the function ``name`` of ``owner`` add its seconds to the returned list."""
    function, times = getattr(owner, name), list[float]()

    def call(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            times.append(time.perf_counter() - began)

    setattr(owner, name, call)
    return times


def copy_s(tensors: list[Tensor], pinned: bool) -> float:
    copies, times = [torch.empty_like(each, device="cpu", pin_memory=pinned) for each in tensors], []
    for _ in range(4):
        began = time.perf_counter()
        for copied, each in zip(copies, tensors, strict=True):
            copied.copy_(each, non_blocking=True)
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(background: bool, megabytes: int, parts: dict[str, list[float]]) -> dict[str, float]:
    for each in parts.values():
        each.clear()
    with tempfile.TemporaryDirectory() as folder:
        times, module = Times(Path(folder)), Net(megabytes)
        batches = [torch.randn(16, WIDTH)] * (BETWEEN * (SAVES + 1) - 1)
        trainer = Trainer(
            max_epochs=1, accelerator="gpu", devices=1, logger=False, callbacks=[times], enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
            plugins=[AsyncCheckpointIO()] if background else [],
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        steps = [later - earlier for earlier, later in zip(times.ends, times.ends[1:], strict=False)]
        state = trainer.optimizers[0].state
        module.to("cuda")
        tensors = [each.to("cuda") for part in state.values() for each in part.values()]
        tensors += [each.detach() for each in module.parameters()]
        after = [
            sum(steps[at : at + 10]) / sum(steps[at - 11 : at - 1]) for at in range(BETWEEN, len(steps) - 10, BETWEEN)
        ]
        return {
            "stall_s": statistics.median(times.stalls[1:]), "first_stall_s": times.stalls[0],
            **{f"{name}_s": statistics.median(each[1:SAVES]) for name, each in parts.items() if each},
            "copy_s": copy_s(tensors, True), "copy_to_pageable_memory_s": copy_s(tensors, False),
            "after": statistics.median(after[1:]), "step_s": statistics.median(steps),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    timed_parts = {"dump": (checkpoint, "dump"), "plan": (AsyncCheckpointIO, "hold"), "fill": (Arena, "fill")}
    parts = {name: timed(*place) for name, place in timed_parts.items()}
    found = {name: measure(name == "background", arguments.megabytes, parts) for name in ("at once", "background")}
    print(f"{torch.get_device_module().get_device_name()}, torch {torch.__version__}, {arguments.megabytes} MB")
    for name, figures in found.items():
        print(f"{name:<11}" + "  ".join(f"{key} {value:.4f}" for key, value in figures.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
