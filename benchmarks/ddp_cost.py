"""What a step of DDP on two processes costs beside the hand-written DDP loop, in one run.

``python benchmarks/ddp_cost.py`` starts two processes on this machine, which meet over Gloo. All contestants use their
one process group and the same model: linear layers of ``--width``, batches of 64 from a list. They take turns, a
stretch of steps each, and a figure is the median over neighbouring stretches of its ratio to the hand-written loop:
processes that share two cores with each other differ more from minute to minute than from library to library.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE = 64
DEPTH = 3
BASELINE = "hand-written DDP loop"
RANKS = 2

Batch = tuple[Tensor, Tensor]


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = itertools.chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*layers, nn.Linear(width, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001)


class Turns:
    """Batches for one contestant, which give the turn to the next one after each stretch.

    Each contestant has its own loop, which cannot be left in its middle. So each runs in a thread, and one thread works
    at a time: whoever asks for the first batch of a stretch waits for its turn.

    Args:
        batches: one stretch of them.
        num_stretches: how often.
        mine: set while it is this contestant's turn.
        over: set by it when a stretch is over.
    """

    def __init__(self, batches: list[Batch], num_stretches: int, mine: Any, over: Any) -> None:
        self.batches, self.num_stretches, self.mine, self.over = batches, num_stretches, mine, over
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return len(self.batches) * self.num_stretches

    def __iter__(self) -> Iterator[Batch]:
        for stretch in range(self.num_stretches):
            self.mine.acquire()
            begin = time.perf_counter()
            yield from self.batches
            if stretch < self.num_stretches - 1:  # who knows the length does not ask for what follows the last batch
                self.seconds.append(time.perf_counter() - begin)
                self.over.release()


# ---- contestants -----------------------------------------------------------------------------------------------------


def hand_written(batches: Turns, width: int) -> None:
    model = DistributedDataParallel(make_model(width))
    optimizer = make_optimizer(model)
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_module(base: type, width: int) -> Any:
    """The same module for drivetrain and for Lightning."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(width)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

    return Module()


QUIET = {
    "max_epochs": 1, "accelerator": "cpu", "devices": RANKS, "strategy": "ddp", "logger": False,
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def drivetrain(batches: Turns, width: int) -> None:
    import drivetrain as dt

    dt.Trainer(**QUIET, default_root_dir=tempfile.gettempdir()).fit(make_module(dt.LightningModule, width), batches)


def engine(batches: Turns, width: int) -> None:
    from drivetrain import Engine

    engine = Engine(accelerator="cpu", devices=RANKS, strategy="ddp")
    engine.launch()
    model = make_model(width)
    model, optimizer = engine.setup(model, make_optimizer(model))
    for x, y in engine.setup_dataloaders(batches):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()


def lightning(batches: Turns, width: int) -> None:
    import lightning.pytorch as pl

    pl.Trainer(**QUIET, default_root_dir=tempfile.gettempdir()).fit(make_module(pl.LightningModule, width), batches)


def fabric(batches: Turns, width: int) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    model = make_model(width)
    model, optimizer = fabric.setup(model, make_optimizer(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def accelerate(batches: Turns, width: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model(width)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


CONTESTANTS: dict[str, tuple[str | None, Callable[[Turns, int], None]]] = {
    BASELINE: (None, hand_written),
    "the same once more": (None, hand_written),
    "drivetrain": ("drivetrain", drivetrain),
    "drivetrain Engine": ("drivetrain", engine),
    "Lightning": ("lightning", lightning),
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def whole(train: Callable[[Turns, int], None], turns: Turns, width: int) -> None:
    """A contestant's thread."""
    try:
        train(turns, width)
    finally:
        turns.over.release()


def run_rank(rank: int, width: int, steps: int, stretches: int, port: int, results: Any) -> None:
    """One process: every contestant in a thread of its own, one working at a time, in the same order on both ranks."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), NODE_RANK="0",
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="bench",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(BATCH_SIZE, width, generator=generator), torch.randn(BATCH_SIZE, 1, generator=generator))
        for _ in range(steps)
    ]
    there = {name: train for name, (package, train) in CONTESTANTS.items() if package is None or find_spec(package)}
    turns: dict[str, Turns] = {}
    threads: dict[str, threading.Thread] = {}
    for name, train in there.items():
        mine, over = threading.Semaphore(0), threading.Semaphore(0)
        turns[name] = Turns(batches, stretches + 2, mine, over)
        threads[name] = threading.Thread(target=whole, args=(train, turns[name], width), daemon=True)
    for name in there:  # the first stretch warms up, and each sets itself up while no other does
        threads[name].start()
        turns[name].mine.release()
        turns[name].over.acquire()
        dist.barrier()
    for stretch in range(stretches):
        names = list(there)
        for name in names[stretch % len(names) :] + names[: stretch % len(names)]:
            dist.barrier()
            turns[name].mine.release()
            turns[name].over.acquire()
    for name in there:  # the last one, with the end of each loop, is not counted
        dist.barrier()
        turns[name].mine.release()
        turns[name].over.acquire()
    results[rank] = {name: turn.seconds[1:] for name, turn in turns.items()}
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=50, help="in a stretch")
    parser.add_argument("--stretches", type=int, default=60)
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for width in arguments.widths:
        with torch.multiprocessing.Manager() as manager:
            results = manager.dict()
            port = 20_000 + os.getpid() % 10_000
            spawn(run_rank, (width, arguments.steps, arguments.stretches, port, results), RANKS)
            seconds = {name: results[0][name] for name in results[0]}
        found[str(width)] = seconds
        rows = []
        for name, mine in seconds.items():
            ratios = [one / base for one, base in zip(mine, seconds[BASELINE], strict=True)]
            each = [1e6 * one / arguments.steps for one in mine]
            rows.append(
                [name, f"{statistics.median(each):.0f}", f"{min(each):.0f}", f"{statistics.median(ratios):.3f}"]
            )
        print(f"\nwidth {width}\n")
        print_table(["loop", "us per step", "fastest", "ratio"], rows)
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), "seconds": found})


if __name__ == "__main__":
    main()
