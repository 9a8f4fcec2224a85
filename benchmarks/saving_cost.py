"""What saving on exceptions costs a step, beside the same fit without it, in one process.

``python benchmarks/saving_cost.py`` trains the smallest model, Linear(16, 32), ReLU and Linear(32, 1), on batches of 8
from a list. The fits take turns, a stretch of steps each; a figure is the median over the stretches of the ratio of the
CPU time to that of the bare fit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from ddp_cost import Turns
from report import print_table
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import OnExceptionCheckpoint

BASELINE = "bare"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


class Smallest(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=0.001)


def fit(turns: Turns, optimizer: str, saves: bool) -> None:
    """A contestant's thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=saves, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
            callbacks=[OnExceptionCheckpoint(folder)] if saves else [],
        )  # fmt: skip
        trainer.fit(Smallest(optimizer), turns)
    turns.over.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="in a stretch")
    parser.add_argument("--stretches", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    batch = (torch.randn(8, 16), torch.randn(8, 1))
    rows = []
    for optimizer in OPTIMIZERS:
        turns: dict[str, Turns] = {}
        for name in (BASELINE, "the same once more", "saving on exceptions"):
            mine, over = threading.Semaphore(0), threading.Semaphore(0)
            turns[name] = Turns([batch] * options.steps, options.stretches + 2, mine, over)
            arguments = (turns[name], optimizer, name.startswith("saving"))
            threading.Thread(target=fit, args=arguments, daemon=True).start()
            mine.release()
            over.acquire()
        for stretch in range(options.stretches + 1):
            names = list(turns)
            for name in names[stretch % len(names) :] + names[: stretch % len(names)]:
                turns[name].mine.release()
                turns[name].over.acquire()
        for name, turn in turns.items():
            pairs = list(zip(turn.seconds[1:], turns[BASELINE].seconds[1:], strict=True))
            each = [1e6 * mine[1] / options.steps for mine, _ in pairs]
            ratios = [mine[1] / base[1] for mine, base in pairs]
            low, _, high = statistics.quantiles(ratios, n=4)
            median = f"{statistics.median(ratios):.3f}"
            found = [f"{statistics.median(each):.0f}", f"{min(each):.0f}", median, f"{low:.2f} to {high:.2f}"]
            rows.append([f"{optimizer}: {name}", *found])
    print_table(["fit", "CPU us per step", "fastest", "ratio", "quartiles"], rows)


if __name__ == "__main__":
    main()
