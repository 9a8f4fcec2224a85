"""Random programs that can be interrupted at any of their points, and the comparison with a run that was not.

A program is made of a seed. While it runs, its callbacks, its module and its savers pass *points*, which are numbered
in the order in which they are passed; an interrupted run is one that is given the number at which it ends. What a run
has come to is a plain dictionary, so that it may have been made in another process.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.base.rank_zero import rank_zero_only
from drivetrain.base.seed import rng_state
from drivetrain.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from drivetrain.data import CombinedLoader
from drivetrain.loggers import CSVLogger
from drivetrain.loggers.logger import Logger
from drivetrain.module.hooks import ModelHooks

MODES = ("exception", "interrupt", "kill")
PER_FIT = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_sanity_check_start",
    "on_sanity_check_end", "on_exception", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
HOOKS = [
    name
    for name, value in vars(Callback).items()
    if callable(value) and name.startswith("on_") and not any(stage in name for stage in ("test", "predict"))
]
NOT_PASSED = ("on_exception", "on_load_checkpoint")  # the run has ended there, or has not begun
MODULE_HOOKS = [
    name for name in vars(ModelHooks)
    if name in HOOKS or name in ("on_before_zero_grad", "on_before_backward", "on_after_backward")
]  # fmt: skip


class Broken(Exception):
    """What a point raises in the mode "exception"."""


@dataclass
class Points:
    """The points of one run.

    Attributes:
        at: the number of the point at which the run ends; -1: none.
        mode: how it ends there.
        names: of the points that were passed.
        fired: the name of the point at which it ended.
        stops_at: the first point at which a stop was asked for. A request to stop is not kept in a checkpoint.
    """

    at: int = -1
    mode: str = "exception"
    names: list[str] = field(default_factory=list)
    fired: str = ""
    stops_at: int | None = None
    trainer: Any = None

    def __call__(self, name: str) -> None:
        """Pass a point; the run may end here."""
        if self.stops_at is None and self.trainer is not None and self.trainer.should_stop:
            self.stops_at = len(self.names)
        self.names.append(name)
        if len(self.names) - 1 != self.at:
            return
        self.fired = name
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if self.mode == "interrupt" else Broken(name)


@dataclass
class Program:
    """What is trained, how, and who saves. Every choice is drawn from ``seed``."""

    seed: int
    workers_allowed: bool = True
    exception_savers: bool = True
    world_size: int = 1

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        pick = draw.choice
        self.manual = draw.random() < 0.2 and self.world_size == 1
        self.precision = pick(["32-true", "32-true", "64-true", "16-mixed", "bf16-mixed"])
        self.accumulate = 1 if self.manual else pick([1, 1, 2, 3])
        self.accumulation_schedule = not self.manual and self.accumulate == 1 and draw.random() < 0.2
        self.schedulers = pick([(), ("step",), ("epoch",), ("plateau",), ("step", "plateau"), ("step plateau",)])
        loaders = ["plain", "plain", "generator", "iterable", "combined", "min_size"]
        if self.workers_allowed:
            loaders += ["one worker", "two workers", "persistent", "combined persistent"]
        if self.world_size > 1:
            loaders = ["plain", "plain", "two workers"] if self.workers_allowed else ["plain"]
        self.loader = pick(loaders)
        self.limit_train = pick([None, None, 4])
        self.val_interval = pick([None, None, 2, 1] + ([0.5] if self.loader != "iterable" else []))
        self.val_every = pick([1, 1, 1, 2]) if self.val_interval is None else pick([1, None])
        if self.val_every is None and not isinstance(self.val_interval, int):
            self.val_every = 1
        self.val_shuffled = draw.random() < 0.3
        self.val_loader = pick(["plain", "generator"] + (["persistent"] if self.workers_allowed else []))
        self.clip = None if self.manual else pick([None, None, 0.5])
        self.max_steps = pick([None, None, 7])
        self.log_every = pick([1, 2, 3])
        self.sanity = pick([0, 2])
        self.own_step = not self.manual and draw.random() < 0.15
        self.csv = draw.random() < 0.3
        self.monitor = "val_loss" if self.val_every in (1, None) and self.world_size == 1 else None
        kinds = ["steps", "epochs", "monitored", "frequent"]
        self.savers = draw.sample(kinds, pick([1, 1, 2]))
        self.on_exception = pick(["callback", "callback", "checkpoint", None]) if self.exception_savers else None
        self.top_k = pick([1, 2, -1])
        self.patience = pick([1, 50, 50])
        self.min_epochs = pick([None, 2])

    @property
    def epochs(self) -> int:
        """How many the run has, unless it is stopped."""
        return 3

    def loaders(self) -> tuple[Any, Any]:
        """The training and the validation loader."""
        workers = {"one worker": 1, "two workers": 2, "persistent": 2}.get(self.loader, 0)
        persistent = self.loader == "persistent"

        def shuffled(count: int = 20, **arguments: Any) -> DataLoader[Any]:
            patience = 60 if arguments.get("num_workers") else 0  # seconds: a worker that hangs is an error
            return DataLoader(Noisy(count), 4, shuffle=True, timeout=patience, **arguments)

        if self.loader == "iterable":
            train: Any = DataLoader(Stream(), 4)
        elif self.loader == "combined":
            train = CombinedLoader({"a": shuffled(), "b": shuffled(8)}, "max_size_cycle")
        elif self.loader == "min_size":
            train = CombinedLoader([shuffled(), shuffled(16)], "min_size")
        elif self.loader == "combined persistent":
            kept = {"num_workers": 1, "persistent_workers": True}
            train = CombinedLoader([shuffled(28, **kept), shuffled(16, **kept)], "min_size")
        elif self.loader == "generator":
            train = shuffled(generator=torch.Generator().manual_seed(self.seed))
        else:
            train = shuffled(num_workers=workers, persistent_workers=persistent)
        arguments: dict[str, Any] = {}
        if self.val_loader == "generator":
            arguments = {"generator": torch.Generator().manual_seed(self.seed)}
        elif self.val_loader == "persistent":
            arguments = {"num_workers": 1, "persistent_workers": True}
        noisy = Noisy(6, noise=0.0 if self.val_loader == "persistent" else 0.1)
        return train, DataLoader(noisy, 3, shuffle=self.val_shuffled, **arguments)


class Noisy(Dataset[Any]):
    """Samples that are disturbed by the global generators where they are fetched."""

    def __init__(self, count: int, noise: float = 0.1) -> None:
        self.noise = noise
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + random.random()
        return self.x[index] + self.noise * noise, self.x[index].sum(0, keepdim=True)


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(20):
            yield torch.full((4,), float(index)) / 10 + torch.randn(4) * 0.1, torch.tensor([index / 5])


# ---- what is trained -------------------------------------------------------------------------------------------------


class Net(LightningModule):
    """Dropout, batch norm, values logged in every way; every hook is a point, and the ends of batches are counted."""

    def __init__(self, program: Program, point: Points) -> None:
        super().__init__()
        self.program, self.point = program, point
        self.automatic_optimization = not program.manual
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.other = nn.Linear(4, 1) if program.manual else nn.Identity()
        self.register_buffer("ends", torch.zeros(3, dtype=torch.int64))

    def loss(self, batch: Any) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        if isinstance(parts[0], torch.Tensor):
            parts = [parts]
        total: torch.Tensor = sum(F.mse_loss(self.net(x.to(self.dtype)), y.to(self.dtype)) for x, y in parts)  # type: ignore[assignment]
        return total

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.point("module.training_step")
        loss = self.loss(batch)
        shared = (
            self.program.world_size > 1
        )  # a checkpoint holds one state of each callback, so ranks must see the same
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4 + batch_idx % 2, sync_dist=shared)
        self.log("noise", torch.rand(()), on_step=True, on_epoch=True, batch_size=4)
        if not self.program.manual:
            return loss
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        self.manual_backward(self.other(next(self._inputs(batch))).pow(2).mean())
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        return None

    def _inputs(self, batch: Any) -> Iterator[torch.Tensor]:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        x = parts[0] if isinstance(parts[0], torch.Tensor) else parts[0][0]
        yield x.to(self.dtype)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.point("module.validation_step")
        self.log("val_loss", self.loss(batch) + torch.rand(()), on_step=True, on_epoch=True, batch_size=3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends[0] += 1  # type: ignore[index]
        self.log("ends", float(self.ends[0]))  # type: ignore[index]
        self.point("module.on_train_batch_end")

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.ends[1] += 1  # type: ignore[index]
        self.point("module.on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.ends[2] += 1  # type: ignore[index]
        self.log("epochs", float(self.ends[2]))  # type: ignore[index]
        self.point("module.on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        if self.program.manual:
            return [
                torch.optim.Adam(self.net.parameters(), lr=0.01),
                torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.5),
            ]
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        made: dict[str, Any] = {
            "step": lambda: {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"},
            "epoch": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "plateau": lambda: {"scheduler": _plateau(optimizer), "monitor": "loss_epoch"},
            "step plateau": lambda: {"scheduler": _plateau(optimizer), "monitor": "loss_step", "interval": "step"},
        }
        return [optimizer], [made[name]() for name in self.program.schedulers]


class StepsItself(Net):
    """The same with an ``optimizer_step`` of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
        optimizer.step(closure=optimizer_closure)
        self.point("module.after_optimizer_step")


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)


def _passing(prefix: str, hook: str) -> Any:
    def passes(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.point(f"{prefix}.{hook}")

    return passes


for _name in MODULE_HOOKS:
    if _name not in vars(Net) and _name not in NOT_PASSED:
        setattr(Net, _name, _passing("module", _name))


# ---- who looks on ----------------------------------------------------------------------------------------------------


class Passing(Callback):
    """Every hook is a point."""

    def __init__(self, point: Points) -> None:
        self.point = point


for _name in [*HOOKS, "setup", "teardown"]:
    if _name not in NOT_PASSED:
        setattr(Passing, _name, _passing("first", _name))


class PassingLast(Callback):
    """The same, behind everybody else."""

    position = "last"

    def __init__(self, point: Points) -> None:
        self.point = point


for _name in [*HOOKS, "setup", "teardown"]:
    if _name not in NOT_PASSED:
        setattr(PassingLast, _name, _passing("last", _name))


class Counter(Callback):
    """Counts what it sees in every hook, but for those that come once per fit and for the sanity check."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = state_dict["counts"]

    def see(self, hook: str, trainer: Any) -> None:
        if not trainer.sanity_checking:
            self.counts[hook] = self.counts.get(hook, 0) + 1


def _counting(hook: str) -> Any:
    def counts(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.see(hook, trainer)

    return counts


for _name in HOOKS:
    if _name not in PER_FIT:
        setattr(Counter, _name, _counting(_name))


class Average(Callback):
    """A moving average of the weights, brought forward at every batch."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in pl_module.named_parameters():
            value = parameter.detach().double()
            if name in self.weights:
                self.weights[name].mul_(0.9).add_(value, alpha=0.1)
            else:
                self.weights[name] = value.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = state_dict["weights"]


class Rows(Logger):
    """Appends every row to a file at once, so that a killed run leaves its rows."""

    name = "rows"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def __init__(self, path: Path, point: Callable[[str], None]) -> None:
        self.path, self.point = path, point

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.point("logger.before")
        with self.path.open("a") as file:
            file.write(json.dumps([step, dict(metrics)]) + "\n")
        self.point("logger.after")

    def log_hyperparams(self, params: Any) -> None: ...


def _savers(program: Program, folder: Path) -> list[Callback]:
    on_checkpoint = program.on_exception == "checkpoint"
    made: dict[str, Callable[[], Callback]] = {
        "steps": lambda: ModelCheckpoint(
            folder / "steps", filename="{step}", every_n_train_steps=2, save_last=True, save_top_k=program.top_k % 2,
            save_on_exception=on_checkpoint,
        ),
        "frequent": lambda: ModelCheckpoint(
            folder / "frequent", filename="{step}", every_n_train_steps=1, save_last=True, save_top_k=-1
        ),
        "epochs": lambda: ModelCheckpoint(
            folder / "epochs", save_last=True, save_top_k=1, save_on_exception=on_checkpoint,
            save_on_train_epoch_end=True,
        ),
        "monitored": lambda: ModelCheckpoint(
            folder / "best", filename="{epoch}-{step}", monitor=program.monitor or "loss_epoch", save_last="link",
            save_top_k=program.top_k, save_on_train_epoch_end=None if program.monitor else True,
        ),
    }  # fmt: skip
    found = [made[name]() for name in program.savers]
    if program.on_exception == "callback":
        found.append(OnExceptionCheckpoint(folder / "exception"))
    return found


def make(program: Program, folder: Path, point: Points) -> tuple[Trainer, Net]:
    """A Trainer and a module as a new process would make them."""
    monitor = program.monitor
    callbacks: list[Callback] = [
        Passing(point), Counter(), Average(), LearningRateMonitor(),
        EarlyStopping(monitor or "loss_epoch", patience=program.patience, check_on_train_epoch_end=monitor is None),
    ]  # fmt: skip
    if program.accumulation_schedule:
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    passing = point if program.world_size == 1 else lambda name: None  # every rank passes the same points
    logger: Any = CSVLogger(folder, "csv", version=0) if program.csv else Rows(folder / "rows.jsonl", passing)
    trainer = Trainer(
        accelerator="cpu", devices=program.world_size, callbacks=[*callbacks, *_savers(program, folder),
        PassingLast(point)], logger=logger, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, precision=program.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=program.accumulate, gradient_clip_val=program.clip,
        max_epochs=program.epochs if program.max_steps is None else -1,
        max_steps=-1 if program.max_steps is None else program.max_steps, min_epochs=program.min_epochs,
        limit_train_batches=program.limit_train, val_check_interval=program.val_interval,
        check_val_every_n_epoch=program.val_every, log_every_n_steps=program.log_every,
        num_sanity_val_steps=program.sanity,
    )  # fmt: skip
    save = trainer.save_checkpoint

    def saving(*args: Any, **kwargs: Any) -> None:
        point("before saving")
        save(*args, **kwargs)
        point("after saving")

    trainer.save_checkpoint = saving  # type: ignore[method-assign]
    torch.manual_seed(program.seed)
    module = (StepsItself if program.own_step else Net)(program, point)
    return trainer, module


@dataclass
class Ended:
    """How a run has ended: its result, or the point at which it was interrupted and the file to resume from."""

    result: dict[str, Any] | None
    fired: str
    warned: list[str]
    points: Points


def run(program: Program, folder: Path, at: int = -1, mode: str = "exception", resumes: bool = False) -> Ended:
    """Run ``program`` in ``folder`` until it has ended or has reached point ``at``; ``resumes``: from what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    point = Points(at, mode)
    trainer, module = make(program, folder, point)
    point.trainer = trainer
    found: list[Path] = []
    if resumes:
        _seed(random.SystemRandom().randrange(2**31))  # a new process has other random numbers
        path: str | None = "last"
        if program.on_exception == "checkpoint" and (found := [*folder.glob("*/*.ckpt")]):
            path = str(max(found, key=os.path.getmtime))
    else:
        path = None
    if path is None or not [*folder.glob("*/last*.ckpt"), *folder.glob("exception/*.ckpt"), *found]:
        _seed(program.seed + 1)
    train, val = program.loaders()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, train, val, ckpt_path=path)
        except (Broken, SystemExit):
            if not point.fired:
                raise
    warned = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    point.trainer = None  # the points may travel between processes
    found_result = None if point.fired else result(trainer, module, folder)
    val._iterator = None  # its workers may persist, and belong to whoever made the loader
    del trainer, module, train, val
    if program.workers_allowed:
        gc.collect()  # iterators that are garbage would otherwise be collected in workers that are forked later
    return Ended(found_result, point.fired, warned, point)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def result(trainer: Trainer, module: Net, folder: Path) -> dict[str, Any]:
    """Everything that must not differ when all is over."""
    savers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    others = [callback for callback in trainer.callbacks if callback not in savers]
    return {
        "weights": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "counters": {**trainer.progress.state_dict(), "total_batches": trainer.progress.total_batches},
        "metrics": dict(trainer.callback_metrics),
        "precision": trainer.precision_plugin.state_dict(),
        "rng": rng_state(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in others if callback.state_dict()},
        "savers": [_of_saver(callback) for callback in savers],
        "rows": rows(folder),
    }


def _of_saver(saver: ModelCheckpoint) -> dict[str, Any]:
    """What it keeps, by names and contents; a file that an interrupted run left was not overwritten, but avoided."""

    def plain(path: str) -> str:
        return re.sub(r"-v\d+(?=\.ckpt$)", "", os.path.basename(path))

    return {
        "best": plain(saver.best_model_path),
        "score": saver.best_model_score,
        "kept": {plain(path): (score, _weights_in(path)) for path, score in saver.best_k_models.items()},
        "last": plain(saver.last_model_path),
        "last weights": _weights_in(saver.last_model_path),
    }


def _weights_in(path: str) -> Any:
    return torch.load(path, weights_only=True)["state_dict"] if path else None


def rows(folder: Path) -> set[tuple[Any, ...]]:
    """Every value that was logged, with its step and its name, by all runs in ``folder``."""
    import csv

    found: set[tuple[Any, ...]] = set()
    if (path := folder / "rows.jsonl").exists():
        for line in path.read_text().splitlines():
            step, metrics = json.loads(line)
            found |= {(step, name, value) for name, value in metrics.items()}
    for path in folder.glob("csv/version_0/metrics.csv"):
        with path.open() as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                found |= {(step, name, float(value)) for name, value in row.items() if value}
    return found


# ---- the comparison --------------------------------------------------------------------------------------------------


def explained(program: Program, interrupted: str, mode: str, resumed: Ended) -> str:
    """Why the results may differ, in parts or altogether; "" where they must not.

    A save in which the exception came is not made up for. An exception in a logger is a warning, so the run goes on to
    its end without what the logger was given. A checkpoint that was saved behind an optimizer's step in the middle of a
    batch warns when a run resumes from it.
    """
    if mode == "exception" and interrupted == "logger.before":
        return "rows: too many [], missing"
    if mode != "kill" and ("saving" in interrupted or interrupted.endswith("on_save_checkpoint")):
        return "savers"
    warned = " ".join(resumed.warned)
    if "between the optimizer's step and the end" in warned and interrupted == "module.after_optimizer_step":
        return "everything"
    if "saved in the middle of a batch" in warned and program.manual:
        return "everything"
    return ""


def unexplained(program: Program, interrupted: str, mode: str, resumed: Ended, expected: dict[str, Any]) -> list[str]:
    """Where the result of a resumed run differs although nothing explains it."""
    assert resumed.result is not None, f"the resumed run was interrupted at {resumed.fired}"
    why = explained(program, interrupted, mode, resumed)
    if why == "everything":
        return []
    may_differ = [f".{why}"] if why else []
    if not any(name.endswith("on_train_start") for name in resumed.points.names):
        # Nothing was left to train, so on_train_end, which writes last.ckpt, was not called again, and the gradients
        # of a window that is still open were not needed.
        may_differ += [".savers[", ".precision.optimizers"]
    return [line for line in differences(resumed.result, expected) if not line.startswith(tuple(may_differ))]


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two results differ, bit for bit."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        equal = found.dtype == expected.dtype and torch.equal(found, expected)
        return [] if equal or (found.isnan().all() and expected.isnan().all()) else [f"{place}: {found} != {expected}"]
    if isinstance(found, dict) and isinstance(expected, dict):
        missing = [f"{place}.{key}: only in one" for key in set(found) ^ set(expected)]
        return missing + [
            line
            for key in found
            if key in expected
            for line in differences(found[key], expected[key], f"{place}.{key}")
        ]
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)) and len(found) == len(expected):
        return [
            line
            for number, (one, other) in enumerate(zip(found, expected, strict=True))
            for line in differences(one, other, f"{place}[{number}]")
        ]
    if isinstance(found, set) and isinstance(expected, set):
        more, less = sorted(found - expected, key=str)[:4], sorted(expected - found, key=str)[:4]
        return [] if found == expected else [f"{place}: too many {more}, missing {less}"]
    equal = bool(found == expected) if type(found) is type(expected) else False
    return [] if equal else [f"{place}: {str(found)[:200]} != {str(expected)[:200]}"]
