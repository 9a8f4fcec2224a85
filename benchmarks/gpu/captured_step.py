"""What ``Trainer(cuda_graphs="auto")`` saves on a GPU, beside loops written by hand.

Run it unattended from a checkout; it takes less than 8 minutes::

    python -m pip install -e . && python benchmarks/gpu/captured_step.py --json captured_step.json

Contestants, all with AdamW on batches that are on the device:

naive
    forward, ``zero_grad``, ``backward``, ``step``.
tuned
    the same step recorded by hand, as a ``torch.accelerator.Graph`` or a ``torch.cuda.CUDAGraph``: static inputs,
    ``capturable=True``.
drivetrain, drivetrain "auto"
    a Trainer without graphs, and with ``cuda_graphs="auto"``.

The small network is bound by launches, the large one by matrix products. Rounds are interleaved; a figure is the median
over rounds of the ratio to the other loop in the same round. The goals at the end are printed as met or missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import LightningModule, Trainer
from drivetrain.accelerators.peak_flops import get_available_flops

WARM_UP = 30
BUDGET_S = 7 * 60  # no round begins later


@dataclass(frozen=True)
class Network:
    """A stack of linear layers: how wide and deep, how many samples in a batch, how many measured steps."""

    width: int
    depth: int
    batch: int
    steps: int

    def build(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(self.width, 1)).to(device)

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        made = [
            (torch.randn(self.batch, self.width, device=device), torch.randn(self.batch, 1, device=device))
            for _ in range(4)
        ]
        return [made[index % 4] for index in range(WARM_UP + self.steps + 1)]

    @property
    def flops(self) -> int:
        """Operations of the matrix products of one step; the first layer needs no gradient of its input."""
        weights = self.width * self.width * self.depth + self.width
        return 6 * self.batch * weights - 2 * self.batch * self.width * self.width


NETWORKS = {"small": Network(64, 4, 32, 2000), "large": Network(4096, 8, 4096, 60)}


class Clock:
    """Reads the time before the first measured step and after the last one, each when the device is done."""

    def __init__(self, steps: int) -> None:
        self.at, self.steps = 0, steps
        self.readings: list[float] = []

    def tick(self) -> None:
        if self.at in (WARM_UP, WARM_UP + self.steps):
            torch.accelerator.synchronize()
            self.readings.append(time.perf_counter())
        self.at += 1

    @property
    def milliseconds(self) -> float:
        begin, end = self.readings
        return (end - begin) / self.steps * 1000


def naive(network: Network, device: torch.device) -> float:
    clock, model = Clock(network.steps), network.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in network.batches(device):
        clock.tick()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return clock.milliseconds


def tuned(network: Network, device: torch.device) -> float:
    clock, model = Clock(network.steps), network.build(device)
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    batches = network.batches(device)
    x, y = (each.clone() for each in batches[0])

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        for _ in range(3):
            step()
    torch.accelerator.current_stream(device).wait_stream(stream)
    optimizer.zero_grad()
    if hasattr(torch.accelerator, "Graph"):
        graph: Any = torch.accelerator.Graph(capture_error_mode="thread_local")
        with stream, graph:
            step()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for inputs, targets in batches:
        clock.tick()
        x.copy_(inputs)
        y.copy_(targets)
        graph.replay()
    return clock.milliseconds


def trained(network: Network, device: torch.device, graphs: Any = False) -> float:
    clock = Clock(network.steps)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network.build(device)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Batches:
        """Reads the clock between steps, because a replayed step runs no code of the module's."""

        def __init__(self) -> None:
            self.all = network.batches(device)

        def __len__(self) -> int:
            return len(self.all)

        def __iter__(self) -> Any:
            for batch in self.all:
                clock.tick()
                yield batch

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator=device.type, devices=1, max_epochs=1, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, cuda_graphs=graphs,
        ).fit(Module(), Batches())  # fmt: skip
    return clock.milliseconds


CONTESTANTS: dict[str, Callable[[Network, torch.device], float]] = {
    "naive": naive,
    "tuned": tuned,
    "drivetrain": trained,
    'drivetrain "auto"': lambda network, device: trained(network, device, "auto"),
}


def compared(times: dict[str, list[float]], one: str, other: str) -> float:
    """How many times as fast ``one`` is as ``other``."""
    return statistics.median(slow / fast for fast, slow in zip(times[one], times[other], strict=True))


def report(name: str, network: Network, times: dict[str, list[float]], peak: int | None) -> list[tuple[str, bool]]:
    for contestant, found in times.items():
        middle = statistics.median(found)
        share = "" if peak is None else f"  MFU {network.flops / (middle / 1000) / peak:6.1%}"
        print(f"{name:<7}{contestant:<19}{middle:9.4f} ms per step  x{compared(times, contestant, 'naive'):.3f}{share}")
    auto = 'drivetrain "auto"'
    beside_tuned, beside_naive = compared(times, auto, "tuned"), compared(times, auto, "naive")
    goals = [
        (f"{name}: within 1 % of the tuned loop ({beside_tuned:.3f})", beside_tuned >= 0.99),
        (f"{name}: never below the naive loop ({beside_naive:.3f})", beside_naive >= 1.0),
    ]
    if name == "small":
        goals.append((f"small: at least 1.3 times the naive loop ({beside_naive:.3f})", beside_naive >= 1.3))
    return goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = torch.accelerator.current_accelerator()
    if device is None or torch.accelerator.device_count() == 0:
        raise SystemExit("There is no GPU here: torch.accelerator sees no device.")
    found: dict[str, dict[str, list[float]]] = {name: {each: [] for each in CONTESTANTS} for name in NETWORKS}
    rounds = 0
    while rounds < arguments.rounds and time.monotonic() - began < BUDGET_S:
        for name, network in NETWORKS.items():
            for contestant, train in CONTESTANTS.items():
                found[name][contestant].append(train(network, device))
        rounds += 1
    described = torch.get_device_module(device).get_device_name()
    print(f"{described}, torch {torch.__version__}, Python {platform.python_version()}, {rounds} rounds")
    peak = get_available_flops(torch.device(device.type, 0), torch.float32)
    goals = [goal for name, network in NETWORKS.items() for goal in report(name, network, found[name], peak)]
    for goal, met in goals:
        print(f"{'met   ' if met else 'MISSED'} {goal}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            figures = {"device": described, "torch": torch.__version__, "milliseconds": found, "goals": goals}
            json.dump(figures, stream, indent=1)


if __name__ == "__main__":
    main()
