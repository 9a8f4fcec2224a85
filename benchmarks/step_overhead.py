"""What one training step costs beside the hand-written loop: microseconds, and calls under ``sys.setprofile``.

The model is as small as is sensible, Linear(16, 32), ReLU, Linear(32, 1) with a mean squared error and SGD on batches
of 8, on one thread: nearly everything that is measured is overhead. It is measured twice: on batches from a DataLoader
over a TensorDataset, as programs have it, and on batches that lie ready in a list, which leaves the loop alone.
``--model cnn`` and ``--model gpt`` take a small network for images of digits and a small GPT instead, whose steps take
milliseconds; ``--sources workers`` takes batches from two worker processes. "First step" is the time from the call that
begins training to the end of its first step; ``--peak`` measures the peak of memory instead, in a process each.

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
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEGMENTS = 4
COUNTED = 200  # steps over which calls are counted; a multiple of log_every_n_steps=50
NAMES = [f"metric_{index}" for index in range(10)]

Batch = tuple[Tensor, Tensor]


class Gpt(nn.Module):
    """Two blocks of width 64; the scores of 65 symbols at 32 positions, as ``cross_entropy`` wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(65, 64), nn.Embedding(32, 64)
        block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(64, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.symbols(x) + self.positions.weight
        return self.scores(self.blocks(hidden, mask=self.mask, is_causal=True)).transpose(1, 2)


@dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
        network: makes the model.
        optimizer: makes the optimizer of its parameters.
        loss: of the model's output and the second tensor of a batch.
        sample: makes n samples.
        batch_size: samples of a batch.
        segment: steps between two readings; for the smallest model a multiple of log_every_n_steps=50, so that each
            segment holds its share of flushes.
        warm_up: steps before the first reading.
    """

    network: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    sample: Callable[[int, torch.Generator], Batch]
    batch_size: int
    segment: int
    warm_up: int


WORKS = {
    "mlp": Work(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        F.mse_loss,
        lambda n, generator: (torch.randn(n, 16, generator=generator), torch.randn(n, 1, generator=generator)),
        batch_size=8, segment=250, warm_up=100,
    ),
    "cnn": Work(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 10),
        ),
        lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        F.cross_entropy,
        lambda n, generator: (
            torch.rand(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator)
        ),
        batch_size=64, segment=50, warm_up=50,
    ),
    "gpt": Work(
        Gpt,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
        F.cross_entropy,
        lambda n, generator: (
            torch.randint(65, (n, 32), generator=generator), torch.randint(65, (n, 32), generator=generator)
        ),
        batch_size=8, segment=50, warm_up=50,
    ),
}  # fmt: skip
work = WORKS["mlp"]
loss_of: Callable[[Tensor, Tensor], Tensor] = work.loss


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
        self.began = time.perf_counter()
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
    return work.network()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return work.optimizer(model.parameters())


class ReadyBatches:
    """Batches in a list. Not the list itself: some libraries take a list for several loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def make_batches(source: str, num_batches: int) -> Iterable[Batch]:
    x, y = work.sample(num_batches * work.batch_size, torch.Generator().manual_seed(0))
    if source == "list":
        return ReadyBatches(list(zip(x.split(work.batch_size), y.split(work.batch_size), strict=True)))
    return DataLoader(TensorDataset(x, y), work.batch_size, num_workers=2 if source == "workers" else 0)


# ---- contestants: each trains for watch.num_batches steps ------------------------------------------------------------


def hand_written(watch: Stopwatch) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for x, y in watch.batches:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        loss = loss_of(model(x), y)
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
            return loss_of(self.net(x), y)

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
        return loss_of(self.net(x), y)

    def step_with_log(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        loss = loss_of(self.net(x), y)
        self.log("loss", loss, prog_bar=on_bar)
        return loss

    def step_with_log_dict(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        watch.step += 1
        if watch.step in watch.marks:
            watch.mark()
        x, y = batch
        loss = loss_of(self.net(x), y)
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
        loss = loss_of(model(x), y)
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
        loss = loss_of(model(x), y)
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
        loss = loss_of(model(x), y)
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
        loss = loss_of(model(x), y)
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
            loss = loss_of(self.net(x), y)
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
            return loss_of(outputs, y), outputs

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


SOURCES = {"loader": "from a DataLoader", "list": "from a list", "workers": "from two workers of a DataLoader"}
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


def time_steps(contestant: Contestant, source: str) -> tuple[list[float], float]:
    """Microseconds per step, one number per segment of one fit, and milliseconds to the end of its first step."""
    watch = Stopwatch(source, [2, *(work.warm_up + 1 + work.segment * segment for segment in range(SEGMENTS + 1))])
    gc.collect()
    watch.began = time.perf_counter()
    with terminal():
        contestant.train(watch, **contestant.arguments)
    second, *readings = watch.readings
    if len(readings) != SEGMENTS + 1:
        raise RuntimeError(f"{contestant.name} made {watch.step} steps instead of {watch.num_batches}")
    first_ms = (second - watch.began) * 1e3
    return [(end - begin) / work.segment * 1e6 for begin, end in itertools.pairwise(readings)], first_ms


def count_calls(contestant: Contestant, source: str) -> tuple[float, float]:
    """Python-function calls and builtin calls per step, in the training thread."""
    watch = Stopwatch(source, [work.warm_up + 1, work.warm_up + COUNTED + 1], counting=True)
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
    firsts: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            segments, first = time_steps(contestant, source)
            times[contestant.name].append(segments)
            firsts[contestant.name].append(first)
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
                "ratio": statistics.median(ratios := [own / plain for own, plain in zip(medians, base, strict=True)]),
                "quartiles": statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3,
                "first_step_ms": statistics.median(firsts[name]),
                "python_calls": counts[name][0],
                "builtin_calls": counts[name][1],
                "segments_us": by_round,
            }
        )
    return rows


def peak_memory(contestant: Contestant, source: str) -> None:
    """Train once in this process and print the peak of its memory."""
    before = psutil.Process().memory_info().rss
    watch = Stopwatch(source, [1, work.warm_up + 1])
    with terminal():
        contestant.train(watch, **contestant.arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{contestant.name}: peak {peak / 2**20:.0f} MiB, of which {before / 2**20:.0f} MiB before training")


def show(rows: list[dict[str, Any]]) -> None:
    base = next(row for row in rows if row["name"] == BASELINE)
    both = base["python_calls"] + base["builtin_calls"]
    print_table(
        [
            "",
            "us per step",
            "fastest",
            "over plain",
            "ratio",
            "quartiles",
            "first step",
            "Python calls",
            "with builtins",
        ],
        [
            [
                row["name"],
                f"{row['median_us']:.1f}",
                f"{row['min_us']:.1f}",
                f"{row['over_us']:+.1f}",
                f"{row['ratio']:.2f}",
                f"{row['quartiles'][0]:.2f} to {row['quartiles'][2]:.2f}",
                f"{row['first_step_ms']:.1f} ms",
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
    parser.add_argument("--model", choices=WORKS, default="mlp")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=["loader", "list"])
    parser.add_argument("--rows", help="only rows of these names, separated by commas, and the hand-written loop")
    parser.add_argument("--peak", action="store_true", help="measure the peak of memory, in a process for each row")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the results, all segments included, to this file")
    arguments = parser.parse_args()
    global work, loss_of
    work = WORKS[arguments.model]
    loss_of = work.loss

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

    if arguments.rows is not None:
        kept = arguments.rows.split(",")
        contestants = [c for c in contestants if c.name == BASELINE or c.name in kept]
    if arguments.in_this_process:
        peak_memory(contestants[-1], arguments.sources[0])
        return
    if arguments.peak:
        for each in contestants:
            options = ["--model", arguments.model, "--sources", arguments.sources[0], "--in-this-process"]
            subprocess.run([sys.executable, __file__, *options, "--rows", each.name], check=False)
        return

    results = {}
    for source in arguments.sources:
        results[source] = measure(contestants, source, arguments.rounds)
        print(f"\nModel {arguments.model}, batches {SOURCES[source]}, median of {arguments.rounds} rounds:\n")
        show(results[source])
    if arguments.json:
        settings = {
            "model": arguments.model, "batch_size": work.batch_size, "segment_steps": work.segment,
            "rounds": arguments.rounds, "threads": 1,
        }  # fmt: skip
        write_json(arguments.json, {"versions": versions(), "settings": settings, "missing": missing, "rows": results})


if __name__ == "__main__":
    main()
