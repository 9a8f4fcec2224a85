"""What a loop on the Engine costs beside the bare loop, in microseconds per step.

Both run in turn, a stretch of steps each, in one process, so that a machine that slows down slows both; the figure is
the median over neighbouring stretches of their difference. The model is that of ``step_overhead.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Engine

STRETCH = 200  # steps


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def stretch(batches: Any, model: Any, optimizer: Any, backward: Callable[[Any], None] | None) -> float:
    """Seconds that one stretch takes; without ``backward`` it is the bare loop's."""
    begin = time.perf_counter()
    if backward is None:
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    else:
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--json", help="write all differences to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(STRETCH)]
    bare_model = make_model()
    bare_optimizer = make_optimizer(bare_model)
    engine, own_model = Engine(accelerator="cpu"), make_model()
    model, optimizer = engine.setup(own_model, make_optimizer(own_model))
    loader = engine.setup_dataloaders(batches)
    bare, ours = [], []
    for pair in range(arguments.pairs + 5):
        turns = [lambda: bare.append(stretch(batches, bare_model, bare_optimizer, None)),
                 lambda: ours.append(stretch(loader, model, optimizer, engine.backward))]  # fmt: skip
        for turn in turns if pair % 2 else reversed(turns):
            turn()
    differences = [(b - a) / STRETCH * 1e6 for a, b in zip(bare[5:], ours[5:], strict=True)]
    print(
        f"bare {statistics.median(bare[5:]) / STRETCH * 1e6:.1f} us per step, "
        f"Engine {statistics.median(differences):+.2f} us (quartiles "
        f"{', '.join(f'{q:+.2f}' for q in statistics.quantiles(differences, n=4)[::2])})"
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            json.dump({"differences_us": differences}, stream)


if __name__ == "__main__":
    main()
