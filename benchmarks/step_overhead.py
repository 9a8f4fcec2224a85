"""What one training step costs beside the hand-written loop: microseconds, and calls under ``sys.setprofile``.

The model is as small as is sensible, Linear(16, 32), ReLU, Linear(32, 1) with a mean squared error and SGD on batches
of 8, on one thread: nearly everything that is measured is overhead. It is measured twice: on batches from a DataLoader
over a TensorDataset, as programs have it, and on batches that lie ready in a list, which leaves the loop alone.

How the time is taken. Each contestant's step function begins with the same two lines, which count steps and read the
clock at a few of them (see ``Stopwatch``). Between two readings lies a whole number of complete steps, with everything
the library does around them: fetching the batch, hooks, bookkeeping, flushing the log. Set-up and the end of the epoch
lie outside. The alternative, fits of N and of 2 N steps and their difference, was not taken: a set-up of tens of
milliseconds varies by more than N steps' overhead.

Rounds are interleaved (A B C, A B C, ...), and each contestant is compared with the hand-written loop of its own round,
so that a machine that slows down for a minute slows both.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 8
WARM_UP = 100  # steps before the first reading
SEGMENT = 250  # steps between two readings; a multiple of log_every_n_steps=50, so that each holds its share of flushes
SEGMENTS = 4
COUNTED = 200  # steps over which calls are counted; a multiple of 50 as well
NAMES = [f"metric_{index}" for index in range(10)]

Batch = tuple[Tensor, Tensor]


class Stopwatch:
    """Reads the clock, or switches the profiler on and off, when the step number is one of ``marks``.

    Step functions count and compare in their own frame: a call per step would be overhead of the benchmark's own.
    """

    def __init__(self, source: str, marks: list[int], counting: bool = False) -> None:
        self.step = 0
        self.marks = frozenset(marks)
        self.num_batches = marks[-1]
        self.batches = make_batches(source, self.num_batches)
        self.counting = counting
        self.readings: list[float] = []  # seconds
        self.python_calls = 0
        self.builtin_calls = 0

    def mark(self) -> None:
        if not self.counting:
            self.readings.append(time.perf_counter())
        elif sys.getprofile() is None:
            sys.setprofile(self._count)
        else:
            sys.setprofile(None)
            # This call, getprofile and setprofile were counted.
            self.python_calls -= 1
            self.builtin_calls -= 2

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.python_calls += 1
        elif event == "c_call":
            self.builtin_calls += 1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class ReadyBatches:
    """Batches in a list. Not the list itself: some libraries take a list for several loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def make_batches(source: str, num_batches: int) -> Iterable[Batch]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_batches * BATCH_SIZE, 16, generator=generator)
    y = torch.randn(num_batches * BATCH_SIZE, 1, generator=generator)
    if source == "loader":
        return DataLoader(TensorDataset(x, y), BATCH_SIZE)
    return ReadyBatches(list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)))


# ---- contestants: each trains for watch.num_batches steps ------------------------------------------------------------


def hand_written(watch: Stopwatch) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for x, y in watch.batches:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def hand_written_method(watch: Stopwatch) -> None:
    """The same loop around a method of an ``nn.Module``, the form in which every Trainer's users write their step."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            watch.step += 1
            if watch.step in watch.marks:
                watch.mark()
            x, y = batch
            return F.mse_loss(self.net(x), y)

    module = Module()
    optimizer = make_optimizer(module)
    training_step = module.training_step
    for batch_idx, batch in enumerate(watch.batches):
        loss = training_step(batch, batch_idx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_lightning_module(base: type, watch: Stopwatch, num_logged: int, on_bar: bool) -> Any:
    """The same module for drivetrain and for Lightning."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

    def step(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def step_with_log(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=on_bar)
        return loss

    def step_with_log_dict(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log_dict(dict.fromkeys(NAMES, loss))
        return loss

    Module.training_step = {0: step, 1: step_with_log, 10: step_with_log_dict}[num_logged]
    return Module()


def drivetrain(
    watch: Stopwatch, num_logged: int = 0, num_callbacks: int = 0, bar: bool = False, default: bool = False
) -> None:
    import drivetrain as dt
    from drivetrain.loggers import CSVLogger

    module = make_lightning_module(dt.LightningModule, watch, num_logged, on_bar=bar or default)
    with tempfile.TemporaryDirectory() as folder:
        dt.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[make_empty_callback(dt.Callback) for _ in range(num_callbacks)],
            default_root_dir=folder,
            logger=CSVLogger(folder) if default else False,
            enable_checkpointing=default,
            enable_progress_bar=bar or default,
            enable_model_summary=default,
        ).fit(module, watch.batches)


def engine(watch: Stopwatch) -> None:
    from drivetrain import Engine

    engine = Engine(accelerator="cpu")
    model = make_model()
    model, optimizer = engine.setup(model, make_optimizer(model))
    for x, y in engine.setup_dataloaders(watch.batches):
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()


def lightning(watch: Stopwatch, num_logged: int = 0, num_callbacks: int = 0, default: bool = False) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    module = make_lightning_module(pl.LightningModule, watch, num_logged, on_bar=default)
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[make_empty_callback(pl.Callback) for _ in range(num_callbacks)],
            default_root_dir=folder,
            logger=CSVLogger(folder) if default else False,
            enable_checkpointing=default,
            enable_progress_bar=default,
            enable_model_summary=default,
        ).fit(module, watch.batches)


def make_empty_callback(base: type) -> Any:
    return type("EmptyCallback", (base,), {})()


def fabric(watch: Stopwatch) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    batches = watch.batches
    if isinstance(batches, DataLoader):  # nothing else is accepted
        batches = fabric.setup_dataloaders(batches)
    for x, y in batches:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def accelerate(watch: Stopwatch) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), watch.batches)
    for x, y in loader:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


def ignite(watch: Stopwatch) -> None:
    from ignite.engine import Engine

    model = make_model()
    optimizer = make_optimizer(model)

    def step(engine: Engine, batch: Batch) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    Engine(step).run(watch.batches, max_epochs=1)


def torchtnt_train_unit(watch: Stopwatch) -> None:
    from torchtnt.framework.state import State
    from torchtnt.framework.train import train
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[Batch]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.optimizer = make_optimizer(self.net)

        def train_step(self, state: State, data: Batch) -> None:
            watch.step += 1
            if watch.step in watch.marks:
                watch.mark()
            x, y = data
            loss = F.mse_loss(self.net(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    train(Unit(), watch.batches, max_epochs=1)


def torchtnt_auto_unit(watch: Stopwatch) -> None:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.state import State
    from torchtnt.framework.train import train

    class Unit(AutoUnit[Batch]):  # type: ignore[misc]
        def compute_loss(self, state: State, data: Batch) -> tuple[Tensor, Tensor]:
            watch.step += 1
            if watch.step in watch.marks:
                watch.mark()
            x, y = data
            outputs = self.module(x)
            return F.mse_loss(outputs, y), outputs

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return make_optimizer(module), None

    train(Unit(module=make_model(), device=torch.device("cpu")), watch.batches, max_epochs=1)


@dataclass
class Contestant:
    """One row of the table."""

    name: str
    package: str | None
    train: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)


SOURCES = {"loader": "from a DataLoader", "list": "from a list"}
BASELINE = "hand-written loop"

CONTESTANTS = [
    Contestant(BASELINE, None, hand_written),
    Contestant("hand-written, step as a method", None, hand_written_method),
    Contestant("drivetrain", "drivetrain", drivetrain),
    Contestant("drivetrain, 1 log", "drivetrain", drivetrain, {"num_logged": 1}),
    Contestant("drivetrain, log_dict of 10", "drivetrain", drivetrain, {"num_logged": 10}),
    Contestant("drivetrain, 10 empty callbacks", "drivetrain", drivetrain, {"num_callbacks": 10}),
    Contestant("drivetrain, progress bar", "drivetrain", drivetrain, {"bar": True}),
    Contestant("drivetrain, 1 log, progress bar", "drivetrain", drivetrain, {"bar": True, "num_logged": 1}),
    Contestant("drivetrain as it comes, 1 log", "drivetrain", drivetrain, {"default": True, "num_logged": 1}),
    Contestant("drivetrain Engine", "drivetrain", engine),
    Contestant("Fabric", "lightning", fabric),
    Contestant("Accelerate", "accelerate", accelerate),
    Contestant("Ignite", "ignite", ignite),
    Contestant("torchtnt TrainUnit", "torchtnt", torchtnt_train_unit),
    Contestant("torchtnt AutoUnit", "torchtnt", torchtnt_auto_unit),
    Contestant("Lightning", "lightning", lightning),
    Contestant("Lightning, 1 log", "lightning", lightning, {"num_logged": 1}),
    Contestant("Lightning, log_dict of 10", "lightning", lightning, {"num_logged": 10}),
    Contestant("Lightning, 10 empty callbacks", "lightning", lightning, {"num_callbacks": 10}),
    Contestant("Lightning as it comes, 1 log", "lightning", lightning, {"default": True, "num_logged": 1}),
]


# ---- measuring -------------------------------------------------------------------------------------------------------


class SwallowingTerminal(io.TextIOBase):
    """Stands for a terminal, so that progress bars draw as they do in one; what they draw goes nowhere."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def terminal() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(SwallowingTerminal()))
        stack.enter_context(redirect_stderr(SwallowingTerminal()))
        yield


def time_steps(contestant: Contestant, source: str) -> list[float]:
    """Microseconds per step, one number per segment of one fit."""
    watch = Stopwatch(source, [WARM_UP + 1 + SEGMENT * segment for segment in range(SEGMENTS + 1)])
    gc.collect()
    with terminal():
        contestant.train(watch, **contestant.arguments)
    readings = watch.readings
    if len(readings) != SEGMENTS + 1:
        raise RuntimeError(f"{contestant.name} made {watch.step} steps instead of {watch.num_batches}")
    return [(end - begin) / SEGMENT * 1e6 for begin, end in itertools.pairwise(readings)]


def count_calls(contestant: Contestant, source: str) -> tuple[float, float]:
    """Python-function calls and builtin calls per step, in the training thread."""
    watch = Stopwatch(source, [WARM_UP + 1, WARM_UP + COUNTED + 1], counting=True)
    with terminal():
        contestant.train(watch, **contestant.arguments)
    return watch.python_calls / COUNTED, watch.builtin_calls / COUNTED


def measure(contestants: list[Contestant], source: str, rounds: int) -> list[dict[str, Any]]:
    contestants = list(contestants)
    counts = {}
    for contestant in list(contestants):  # this round also warms everybody up
        try:
            counts[contestant.name] = count_calls(contestant, source)
            time_steps(contestant, source)
        except Exception as error:
            sys.setprofile(None)
            print(f"{contestant.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            contestants.remove(contestant)
    # What importing all of these libraries has left behind is no contestant's fault: keep it out of later collections.
    gc.collect()
    gc.freeze()
    times: dict[str, list[list[float]]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            times[contestant.name].append(time_steps(contestant, source))
        print(f"\r{source}: round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    base = [statistics.median(segments) for segments in times[BASELINE]]
    rows = []
    for name, by_round in times.items():
        medians = [statistics.median(segments) for segments in by_round]
        segments = [segment for segments in by_round for segment in segments]
        rows.append(
            {
                "name": name,
                "median_us": statistics.median(segments),
                "min_us": min(segments),
                "over_us": statistics.median(own - plain for own, plain in zip(medians, base, strict=True)),
                "ratio": statistics.median(own / plain for own, plain in zip(medians, base, strict=True)),
                "python_calls": counts[name][0],
                "builtin_calls": counts[name][1],
                "segments_us": by_round,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    base = next(row for row in rows if row["name"] == BASELINE)
    both = base["python_calls"] + base["builtin_calls"]
    print_table(
        ["", "us per step", "fastest", "over plain", "ratio", "Python calls", "with builtins"],
        [
            [
                row["name"],
                f"{row['median_us']:.1f}",
                f"{row['min_us']:.1f}",
                f"{row['over_us']:+.1f}",
                f"{row['ratio']:.2f}",
                f"{row['python_calls']:.1f} ({row['python_calls'] / base['python_calls'] - 1:+.0%})",
                f"{(total := row['python_calls'] + row['builtin_calls']):.1f} ({total / both - 1:+.0%})",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", help="packages to measure beside the hand-written loop, separated by commas")
    parser.add_argument("--json", help="write the results, all segments included, to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("COLUMNS", "100")  # the width of the terminal that is not there

    wanted = None if arguments.only is None else arguments.only.split(",")
    packages = {c.package for c in CONTESTANTS if c.package and (wanted is None or c.package in wanted)}
    missing = sorted(package for package in packages if find_spec(package) is None)
    if missing:
        print(f"Not installed, so not measured: {', '.join(missing)}", file=sys.stderr)
    contestants = [c for c in CONTESTANTS if c.package is None or c.package in packages.difference(missing)]

    results = {}
    for source, title in SOURCES.items():
        results[source] = measure(contestants, source, arguments.rounds)
        print(f"\nBatches {title}, median of {arguments.rounds} rounds:\n")
        show(results[source])
    if arguments.json:
        settings = {"batch_size": BATCH_SIZE, "segment_steps": SEGMENT, "rounds": arguments.rounds, "threads": 1}
        write_json(arguments.json, {"versions": versions(), "settings": settings, "missing": missing, "rows": results})


if __name__ == "__main__":
    main()
