"""What a step of DDP on two processes costs beside the hand-written DDP loop, in one run.

``python benchmarks/ddp_cost.py`` starts two processes on this machine, which meet over Gloo. All contestants use their
one process group and the same model: linear layers of ``--width``, batches of 64 from a list. They take turns, a
stretch of steps each, and a figure is the median over neighbouring stretches of its ratio to the hand-written loop:
processes that share two cores with each other differ more from minute to minute than from library to library. CPU
time is that of all ranks together.

``--levers`` compares the hand-written loop with itself under other arguments of DistributedDataParallel, and prints
whether losses and parameters are equal bit for bit.
"""

from __future__ import annotations

import argparse
import functools
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
BASELINE = "hand-written DDP loop"

Batch = tuple[Tensor, Tensor]
MakeModel = Callable[[], nn.Module]


def make_model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = itertools.chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
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
        self.seconds: list[tuple[float, float]] = []  # wall time and CPU time of each stretch

    def __len__(self) -> int:
        return len(self.batches) * self.num_stretches

    def __iter__(self) -> Iterator[Batch]:
        for stretch in range(self.num_stretches):
            self.mine.acquire()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            yield from self.batches
            if stretch < self.num_stretches - 1:  # who knows the length does not ask for what follows the last batch
                self.seconds.append((time.perf_counter() - begin, time.process_time() - cpu_begin))
                self.over.release()


# ---- contestants -----------------------------------------------------------------------------------------------------


def hand_written(batches: Any, make: MakeModel, **ddp_arguments: Any) -> nn.Module:
    model = DistributedDataParallel(make(), **ddp_arguments)
    optimizer = make_optimizer(model)
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def make_module(base: type, make: MakeModel) -> Any:
    """The same module for drivetrain and for Lightning."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

    return Module()


def quiet() -> dict[str, Any]:
    """Arguments of a Trainer."""
    return {
        "max_epochs": 1, "accelerator": "cpu", "devices": dist.get_world_size(), "strategy": "ddp", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip


def drivetrain(batches: Turns, make: MakeModel) -> None:
    import drivetrain as dt

    dt.Trainer(**quiet(), default_root_dir=tempfile.gettempdir()).fit(make_module(dt.LightningModule, make), batches)


def engine(batches: Turns, make: MakeModel) -> None:
    from drivetrain import Engine

    engine = Engine(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    engine.launch()
    model = make()
    model, optimizer = engine.setup(model, make_optimizer(model))
    for x, y in engine.setup_dataloaders(batches):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()


def lightning(batches: Turns, make: MakeModel) -> None:
    import lightning.pytorch as pl

    pl.Trainer(**quiet(), default_root_dir=tempfile.gettempdir()).fit(make_module(pl.LightningModule, make), batches)


def fabric(batches: Turns, make: MakeModel) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = make()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def accelerate(batches: Turns, make: MakeModel) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


Train = Callable[[Turns, MakeModel], Any]

CONTESTANTS: dict[str, tuple[str | None, Train]] = {
    BASELINE: (None, hand_written),
    "the same once more": (None, hand_written),
    "drivetrain": ("drivetrain", drivetrain),
    "drivetrain Engine": ("drivetrain", engine),
    "Lightning": ("lightning", lightning),
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
}

LEVERS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "the same once more": {},
    "gradient_as_bucket_view=True": {"gradient_as_bucket_view": True},
    "batched_grad_copy=True": {"batched_grad_copy": True},
    "broadcast_buffers=False": {"broadcast_buffers": False},
    "bucket_cap_mb=25": {"bucket_cap_mb": 25},  # the first bucket too, which otherwise has at most 1 MiB
    "static_graph=True": {"static_graph": True},
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def contestants(levers: bool) -> dict[str, Train]:
    if levers:
        return {name: functools.partial(hand_written, **arguments) for name, arguments in LEVERS.items()}
    return {name: train for name, (package, train) in CONTESTANTS.items() if package is None or find_spec(package)}


def trained(batches: list[Batch], make: MakeModel, arguments: dict[str, Any]) -> list[Tensor]:
    """Train as :func:`hand_written` does; return the outputs of all steps, and the parameters."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(output.detach())

    def watched() -> nn.Module:
        model = make()
        model.register_forward_hook(keep)
        return model

    model = hand_written(batches, watched, **arguments)
    return outputs + [each.detach() for each in model.parameters()]


def whole(train: Train, turns: Turns, make: MakeModel) -> None:
    """A contestant's thread."""
    try:
        train(turns, make)
    finally:
        turns.over.release()


def run_rank(rank: int, make: MakeModel, options: argparse.Namespace, port: int, results: Any) -> None:
    """One process: every contestant in a thread of its own, one working at a time, in the same order on all ranks."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_WORLD_SIZE=str(options.ranks),
        NODE_RANK="0", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="bench",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator, width = torch.Generator().manual_seed(rank), next(make().parameters()).shape[1]
    batches = [
        (torch.randn(BATCH_SIZE, width, generator=generator), torch.randn(BATCH_SIZE, 1, generator=generator))
        for _ in range(options.steps)
    ]
    if options.levers:
        usual = trained(batches, make, {})
        found = {name: all(map(torch.equal, usual, trained(batches, make, LEVERS[name]))) for name in LEVERS}
        results["equal", rank] = found
    there, stretches = contestants(options.levers), options.stretches
    turns: dict[str, Turns] = {}
    threads: dict[str, threading.Thread] = {}
    for name, train in there.items():
        mine, over = threading.Semaphore(0), threading.Semaphore(0)
        turns[name] = Turns(batches, stretches + 2, mine, over)
        threads[name] = threading.Thread(target=whole, args=(train, turns[name], make), daemon=True)
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


def measured(make: MakeModel, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return each contestant's wall and CPU seconds of each stretch, and whether each lever's numbers are equal."""
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(run_rank, (make, options, 20_000 + os.getpid() % 10_000, results), options.ranks)
        found = dict(results)
    ranks = range(options.ranks)
    seconds = {
        name: [
            (wall, sum(found[rank][name][stretch][1] for rank in ranks))
            for stretch, (wall, _) in enumerate(found[0][name])
        ]
        for name in found[0]
    }
    return seconds, {name: all(found["equal", rank][name] for rank in ranks) for name in found.get(("equal", 0), {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--depth", type=int, default=3, help="hidden layers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--levers", action="store_true", help="compare arguments of DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=50, help="in a stretch")
    parser.add_argument("--stretches", type=int, default=60)
    parser.add_argument("--json", help="write all times to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # torch.set_num_threads sets the threads of the calling thread only
    everything: dict[str, Any] = {}
    for width in options.widths:
        seconds, equal = measured(functools.partial(make_model, width, options.depth), options)
        everything[str(width)] = seconds
        rows = []
        for name, mine in seconds.items():
            row = [name]
            for kind in range(2):
                each = [1e6 * one[kind] / options.steps for one in mine]
                ratios = [one[kind] / base[kind] for one, base in zip(mine, seconds[BASELINE], strict=True)]
                row += [f"{statistics.median(each):.0f}", f"{min(each):.0f}", f"{statistics.median(ratios):.3f}"]
            rows.append(row + (["yes" if equal[name] else "no"] if equal else []))
        print(f"\nwidth {width}, {options.depth} hidden layers, {options.ranks} ranks\n")
        columns = ["loop", "us per step", "fastest", "ratio", "CPU us", "fastest", "ratio"]
        print_table(columns + (["equal"] if equal else []), rows)
    if options.json:
        write_json(options.json, {"versions": versions(), "arguments": vars(options), "seconds": everything})


if __name__ == "__main__":
    main()
