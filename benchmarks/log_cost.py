"""What one ``self.log`` in a training step costs, in microseconds, measured inside one fit.

``step_overhead.py`` compares fits, and two fits that do the same differ by more microseconds than one ``self.log``
costs. Here a single fit logs in every other stretch of steps, and each silent stretch is compared with the mean of its
two neighbours, so that the pair shares process, memory layout and moment. The model and the batches are those of
``step_overhead.py``; nothing reads the value (no logger, no bar), as in its row "1 log".
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import statistics
import warnings
from typing import Any

import torch
from report import print_table, write_json
from step_overhead import SOURCES, WARM_UP, Batch, Stopwatch, make_model, make_optimizer, terminal
from torch import Tensor
from torch.nn import functional as F

import drivetrain as dt

STRETCH = 50  # steps: one flush interval
STRETCHES = 80  # in one fit, of which every other logs


class Module(dt.LightningModule):
    """Logs while ``logs`` is True; the switch is read in both kinds of step."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.net = make_model()
        self.watch = watch
        self.logs = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        watch = self.watch
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
            self.logs = not self.logs
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def differences(source: str) -> list[float]:
    """One fit: for each silent stretch, how much longer a step took in the stretches around it, in microseconds."""
    watch = Stopwatch(source, [WARM_UP + 1 + STRETCH * index for index in range(STRETCHES + 1)])
    gc.collect()
    with terminal():
        dt.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(watch), watch.batches)
    steps = [(end - begin) / STRETCH * 1e6 for begin, end in itertools.pairwise(watch.readings)]
    return [(steps[index - 1] + steps[index + 1]) / 2 - steps[index] for index in range(1, STRETCHES - 1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=20)
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    rows: list[dict[str, Any]] = []
    for source, title in SOURCES.items():
        found = [difference for _ in range(arguments.fits) for difference in differences(source)]
        low, median, high = statistics.quantiles(found, n=4)
        rows.append({"batches": title, "median_us": median, "quartiles_us": [low, high], "pairs": len(found)})
    print_table(
        ["batches", "one self.log", "quartiles", "pairs"],
        [
            [
                row["batches"],
                f"{row['median_us']:.2f} us",
                "{:.1f} to {:.1f}".format(*row["quartiles_us"]),
                str(row["pairs"]),
            ]
            for row in rows
        ],
    )
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
