"""What a training step costs on a GPU beside the hand-written loop, in microseconds of the host per step.

Lightning and Accelerate take part where they are installed.

A small model, so that the host is what limits it: whatever a library adds shows. Rounds are interleaved, and each
figure is the median over rounds of the difference to the hand-written loop of the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import drivetrain
from drivetrain import Engine

STEPS, WARM_UP = 2000, 200


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))


class Clock:
    """Reads the time at the first step after warming up and at the last, each after the device is done."""

    def __init__(self) -> None:
        self.step = 0
        self.begin = self.end = 0.0

    def tick(self) -> None:
        self.step += 1
        if self.step in (WARM_UP, WARM_UP + STEPS):
            torch.accelerator.synchronize()
            now = time.perf_counter()
            self.begin, self.end = (now, self.end) if self.step == WARM_UP else (self.begin, now)

    @property
    def microseconds(self) -> float:
        return (self.end - self.begin) / STEPS * 1e6


def batches() -> list[tuple[Tensor, Tensor]]:
    device = torch.accelerator.current_accelerator()
    x, y = torch.randn(32, 64, device=device), torch.randn(32, 1, device=device)
    return [(x, y)] * (WARM_UP + STEPS + 1)


def hand_written() -> float:
    clock, model = Clock(), make_model().to(torch.accelerator.current_accelerator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches():
        clock.tick()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return clock.microseconds


def engine() -> float:
    clock, engine, model = Clock(), Engine(accelerator="gpu", devices=1), make_model()
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in engine.setup_dataloaders(batches()):
        clock.tick()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()
    return clock.microseconds


def accelerated() -> float:
    from accelerate import Accelerator

    clock, accelerator, model = Clock(), Accelerator(), make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in batches():
        clock.tick()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return clock.microseconds


def trainer(logs: bool = False, package: Any = drivetrain) -> float:
    clock = Clock()

    class Module(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.tick()
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Batches:
        """Not a list, which would be several loaders."""

        def __init__(self) -> None:
            self.all = batches()

        def __len__(self) -> int:
            return len(self.all)

        def __iter__(self) -> Any:
            return iter(self.all)

    with tempfile.TemporaryDirectory() as folder:
        package.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        ).fit(Module(), Batches())  # fmt: skip
    return clock.microseconds


CONTESTANTS: dict[str, Callable[[], float]] = {
    "hand-written loop": hand_written,
    "drivetrain Engine": engine,
    "drivetrain": trainer,
    "drivetrain, 1 log": lambda: trainer(logs=True),
}
if importlib.util.find_spec("accelerate"):
    CONTESTANTS["Accelerate"] = accelerated
if importlib.util.find_spec("lightning"):
    pytorch = importlib.import_module("lightning.pytorch")
    CONTESTANTS["Lightning"] = lambda: trainer(package=pytorch)
    CONTESTANTS["Lightning, 1 log"] = lambda: trainer(logs=True, package=pytorch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    if torch.accelerator.current_accelerator() is None or torch.accelerator.device_count() == 0:
        raise SystemExit("There is no GPU here: torch.accelerator sees no device.")
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(arguments.rounds):
        for name, train in CONTESTANTS.items():
            found[name].append(train())
    bare = found["hand-written loop"]
    device = torch.get_device_module(torch.accelerator.current_accelerator()).get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {arguments.rounds} rounds")
    for name, times in found.items():
        more = statistics.median(time - other for time, other in zip(times, bare, strict=True))
        print(f"{name:<24}{statistics.median(times):8.1f} us per step  {more:+7.1f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            json.dump({"device": device, "torch": torch.__version__, "microseconds": found}, stream, indent=1)


if __name__ == "__main__":
    main()
