"""What the replay of an optimizer step costs, beside a training step of the same model.

``python benchmarks/replay_check.py`` trains a small transformer with Adam in one process, and replays every second
step, so that both kinds of step take turns; a time is the median over them, of the process's CPU time or, on a GPU, of
the wall time. The last column is what ``replay_every=100`` adds to the mean step. ``--operations`` also records the
operations of two further passes in each replay, as after a difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from replica_check import VOCABULARY, Transformer, wait
from report import print_table, versions, write_json
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Trainer
from drivetrain.callbacks import ReplayCheck


class Times(Callback):
    """The CPU times of the steps in ms: at even indices without a replay, at odd ones with one."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        wait(trainer)
        self.clock = time.process_time if trainer.strategy.root_device.type == "cpu" else time.perf_counter
        self.begin = self.clock()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        wait(trainer)
        self.found.append(1000 * (self.clock() - self.begin))


class Recording(ReplayCheck):
    def _compare(self, trainer: Any, window: Any) -> None:
        super()._compare(trainer, window)
        window.operations()
        window.operations()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--operations", action="store_true")
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    module = Transformer(arguments.width, arguments.layers)
    tokens = torch.randint(VOCABULARY, (arguments.batch * 8, arguments.length + 1))
    times, check = Times(), (Recording if arguments.operations else ReplayCheck)(2, on_mismatch="stop")
    Trainer(
        accelerator=arguments.device, devices=1, max_steps=arguments.steps, callbacks=[times, check], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision=arguments.precision,
    ).fit(module, DataLoader(TensorDataset(tokens), batch_size=arguments.batch))  # fmt: skip
    steps, replayed = times.found[2::2], times.found[3::2]
    step, twice = statistics.median(steps), statistics.median(replayed)
    parameters = sum(each.numel() for each in module.parameters())
    row = [f"{parameters:,}", f"{step:.1f}", f"{min(steps):.1f}", f"{twice:.1f}", f"{min(replayed):.1f}"]
    ratio = (twice - step) / step
    print_table(
        ["parameters", "step ms", "fastest", "with a replay ms", "fastest", "replay / step", "at N=100"],
        [[*row, f"{ratio:.2f}", f"{ratio:.2f} %"]],
    )
    if arguments.json:
        found = {"step_ms": steps, "replayed_ms": replayed, "parameters": parameters}
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), **found})


if __name__ == "__main__":
    main()
