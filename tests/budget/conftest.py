from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drivetrain
from drivetrain import LightningModule, Trainer

OURS = str(Path(drivetrain.__file__).parent)
LOOKUP = vars(LightningModule)["__getattr__"].__code__
"""Finds a layer, in place of torch's function and in no more bytecodes, which a test counts."""
STEPS, WARMUP = 400, 100  # counted steps hold eight flushes


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The benchmark after which the file of the tests is called, as a module."""
    name = request.module.__name__.rpartition("test_")[2]
    sys.path.insert(0, str(BENCHMARKS))  # it imports its neighbours
    try:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


@dataclass
class Calls:
    """Calls of Python functions (``python``) per step, those of the library among them (``own``), and of builtins."""

    python: float
    c: float
    own: float

    @property
    def all(self) -> float:
        return self.python + self.c


class Counting:
    """Counts calls between two marks that the step itself sets, so that set-up and teardown are not counted."""

    def __init__(self) -> None:
        self.step = 0
        self.events: Counter[str] = Counter()

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        self.events[event] += 1
        own = frame.f_code is not LOOKUP and frame.f_code.co_filename.startswith(OURS)
        self.events["own"] += event == "call" and own

    def mark(self) -> None:
        """Call once per step, at the same point of each."""
        if self.step == WARMUP:
            sys.setprofile(self._profile)
        elif self.step == WARMUP + STEPS:
            sys.setprofile(None)
        self.step += 1

    def per_step(self) -> Calls:
        assert self.step > WARMUP + STEPS
        # the call of mark() itself, and of setprofile at its end, are not the loop's
        own = self.events["own"] / STEPS
        return Calls((self.events["call"] - STEPS) / STEPS, (self.events["c_call"] - 1) / STEPS, own)


class Smallest(LightningModule):
    """Linear(16, 32), ReLU, Linear(32, 1) with MSE and SGD."""

    def __init__(self, counting: Counting | None = None, log: Callable[[LightningModule, Any], None] | None = None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.__dict__["counting"], self.__dict__["log_it"] = counting, log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.__dict__["counting"] is not None:
            self.__dict__["counting"].mark()
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if self.__dict__["log_it"] is not None:
            self.__dict__["log_it"](self, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches:
    """Batches that lie ready: a DataLoader makes many calls per batch, which would hide some of the loop's."""

    def __init__(self, count: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
        self.batches = [(x, x.sum(1, keepdim=True))] * count

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def bare_trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def hand_written() -> Calls:
    model, counting = Smallest().net, Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in Batches(WARMUP + STEPS + 2):
        counting.mark()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return counting.per_step()


def trained(log: Callable[[LightningModule, Any], None] | None = None, **arguments: Any) -> Calls:
    counting = Counting()
    bare_trainer(**arguments).fit(Smallest(counting, log), Batches(WARMUP + STEPS + 2))
    return counting.per_step()


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def budget() -> Any:
    """The names above, for tests: a conftest cannot be imported."""
    return SimpleNamespace(
        Smallest=Smallest, Batches=Batches, bare_trainer=bare_trainer, hand_written=hand_written, trained=trained
    )
