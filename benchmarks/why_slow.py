"""What it costs a training step that a thread measures where the time goes.

``python benchmarks/why_slow.py`` trains the model of ``step_overhead.py`` in fits of some seconds, in turn without the
thread and with one that looks 100 times as often as it does after 10 s, which is twice a second. Looks are that much
more frequent because the cost of two a second is below what two fits differ by. The cost of one look is what the
steps of both fits differ by, divided by the number of looks: of wall time, and of CPU time of the thread that trains.
The CPU time of the measuring thread itself is in the third row; it runs on another core, if there is one.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from report import print_table, versions, write_json
from step_overhead import ReadyBatches, make_model, make_optimizer
from torch.nn import functional as F

from drivetrain import LightningModule, Trainer
from drivetrain.advice import sampler as sampling

FASTER, STEADY_S, START_S = 100, 0.5, 0.1


class Module(LightningModule):
    """Reads the clocks in its first and its last step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net, self.marks, self.readings = make_model(), {100, steps - 1}, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.marks:
            self.readings.append((time.perf_counter(), time.thread_time()))
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.net)


class Counted(sampling.Sampler):
    """Counts its looks, and the CPU time of its thread."""

    looks, cpu_s = 0, 0.0

    def run(self) -> None:
        super().run()
        type(self).cpu_s += time.thread_time()

    def _look(self) -> None:
        type(self).looks += 1
        super()._look()


class Off(sampling.Sampler):
    def run(self) -> None:
        pass


@contextmanager
def measured_by(kind: type[sampling.Sampler]) -> Iterator[None]:
    from drivetrain.trainer import life

    before, interval = life.Sampler, sampling._EVERY_S
    life.Sampler, sampling._EVERY_S = kind, (STEADY_S / FASTER, STEADY_S / FASTER)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        life.Sampler, sampling._EVERY_S = before, interval  # type: ignore[misc]


def fit(kind: type[sampling.Sampler], steps: int) -> tuple[float, float]:
    """Return the wall time and the CPU time of the steps of one fit, in seconds."""
    x = torch.randn(8, 16)
    module = Module(steps)
    with measured_by(kind):
        Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, ReadyBatches([(x, x[:, :1])] * steps))  # fmt: skip
    (wall_s, cpu_s), (wall_end_s, cpu_end_s) = module.readings
    return wall_end_s - wall_s, cpu_end_s - cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("drivetrain").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    wall, cpu, own, steps_us = list[float](), list[float](), list[float](), list[float]()
    for _ in range(arguments.rounds):
        off = fit(Off, arguments.steps)
        Counted.looks, Counted.cpu_s = 0, 0.0
        on = fit(Counted, arguments.steps)
        wall.append(1e6 * (on[0] - off[0]) / Counted.looks)
        cpu.append(1e6 * (on[1] - off[1]) / Counted.looks)
        own.append(1e6 * Counted.cpu_s / Counted.looks)
        steps_us.append(1e6 * off[0] / (arguments.steps - 100))
    rows = []
    for name, found in (("wall time", wall), ("CPU, training thread", cpu), ("CPU, measuring thread", own)):
        low, middle, high = (each for each in statistics.quantiles(found, n=4))
        shares = [f"{middle / 1e6 / each:.4%}" for each in (START_S, STEADY_S)]
        rows.append([name, f"{middle:.0f}", f"{low:.0f} to {high:.0f}", *shares])
    print(f"a step: {statistics.median(steps_us):.0f} us")
    print_table(["of a look", "us", "quartiles", f"at {1 / START_S:g} looks a second", f"at {1 / STEADY_S:g}"], rows)
    if arguments.json:
        found = {"wall_us": wall, "cpu_us": cpu, "own_us": own, "step_us": steps_us}
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), **found})


if __name__ == "__main__":
    main()
