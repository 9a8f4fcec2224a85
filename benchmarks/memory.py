"""Whether anything grows while training: live tensors and resident memory after 1,000 and after 10,000 steps.

Each contestant runs in a process of its own, with one logged value, in one epoch. Memory is read inside the step, so
what one step holds is included in both readings and cancels.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from typing import Any

import psutil
import torch
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

READ_AT = (1_000, 10_000)  # steps

Batch = tuple[Tensor, Tensor]


class Meter:
    """Counts steps and reads memory at some of them."""

    def __init__(self) -> None:
        self.step = 0
        self.readings: list[dict[str, int]] = []

    def tick(self) -> None:
        self.step += 1
        if self.step in READ_AT:
            gc.collect()
            tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
            rss = psutil.Process().memory_info().rss
            self.readings.append({"step": self.step, "tensors": tensors, "rss_bytes": rss})


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def make_loader() -> DataLoader[Batch]:
    num_samples = READ_AT[-1] * 8
    return DataLoader(TensorDataset(torch.randn(num_samples, 16), torch.randn(num_samples, 1)), batch_size=8)


def hand_written(meter: Meter) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in make_loader():
        meter.tick()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_module(meter: Meter, package: Any, loggers: Any) -> None:
    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            meter.tick()
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with tempfile.TemporaryDirectory() as folder:
        trainer = package.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=folder, logger=loggers.CSVLogger(folder)
        )
        trainer.fit(Module(), make_loader())


def drivetrain(meter: Meter) -> None:
    import drivetrain
    from drivetrain import loggers

    train_module(meter, drivetrain, loggers)


def lightning(meter: Meter) -> None:
    import lightning.pytorch
    from lightning.pytorch import loggers

    train_module(meter, lightning.pytorch, loggers)


CONTESTANTS = {"hand-written loop": hand_written, "drivetrain": drivetrain, "Lightning": lightning}


def run_in_own_process(name: str) -> list[dict[str, int]] | None:
    command = [sys.executable, "-W", "ignore", __file__, "--contestant", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} is left out: {(done.stderr.strip() or 'no message').splitlines()[-1]}", file=sys.stderr)
        return None
    readings: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    if arguments.contestant:
        meter = Meter()
        CONTESTANTS[arguments.contestant](meter)
        print(f"\n{json.dumps(meter.readings)}")
        return

    results = {name: readings for name in CONTESTANTS if (readings := run_in_own_process(name)) is not None}
    rows = [
        [
            name,
            f"{early['tensors']}",
            f"{late['tensors']}",
            f"{early['rss_bytes'] / 2**20:.1f}",
            f"{late['rss_bytes'] / 2**20:.1f}",
            f"{(late['rss_bytes'] - early['rss_bytes']) / 2**20:+.1f}",
        ]
        for name, (early, late) in results.items()
    ]
    header = [
        "",
        *(f"tensors at {step:,}" for step in READ_AT),
        *(f"MiB at {step:,}" for step in READ_AT),
        "growth MiB",
    ]
    print_table(header, rows)
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "rows": results})


if __name__ == "__main__":
    main()
