"""Many Trainers in one process leave nothing behind: no thread, signal handler, process group, file or tensor."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping
from drivetrain.loggers import CSVLogger, TensorBoardLogger

DATASET = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)


class Failing(Exception):
    """What the tests raise."""


class Net(LightningModule):
    """``fails`` says in which step, and by what."""

    def __init__(self, fails: str = "", error: type[BaseException] = Failing) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.fails, self.error = fails, error

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails == "training" and batch_idx == 1:
            raise self.error
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails == "validation" and not self.trainer.sanity_checking:
            raise self.error
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Net):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        self.log("loss", 1.0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.net]


# ---- what a process looks like from outside of a run -----------------------------------------------------------------

SWITCHES: dict[str, Callable[[], Any]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "anomaly": torch.is_anomaly_enabled,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "matmul precision": torch.get_float32_matmul_precision,
    "threads": torch.get_num_threads,
}


def open_files() -> Any:
    """What each file descriptor of this process points to; ``None`` where the system does not say."""
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return None
    found: Counter[str] = Counter()
    for name in os.listdir(folder):
        try:
            found[os.readlink(f"{folder}/{name}")] += 1
        except OSError:  # the one with which the folder itself was listed
            continue
    return found


def process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def log_handlers() -> dict[str, list[Any]]:
    loggers = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {name: list(found) for name, logger in loggers.items() if (found := getattr(logger, "handlers", []))}


LOOKS: dict[str, Callable[[], Any]] = {
    "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
    "signals": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "process group": process_group,
    "files": open_files,
    "tensors": live_tensors,
    "children": lambda: sorted(child.pid for child in psutil.Process().children(recursive=True)),
    "switches": lambda: {name: read() for name, read in SWITCHES.items()},
    "warning filters": lambda: list(warnings.filters),
    "environment": lambda: dict(os.environ),
    "working directory": os.getcwd,
    "log handlers": log_handlers,
    "hooks": lambda: (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr, sys.gettrace(), sys.getprofile()),
}


def look() -> dict[str, Any]:
    gc.collect()
    gc.collect()  # what the finalizers of the first pass let go
    return {name: read() for name, read in LOOKS.items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: (before[name], after[name]) for name in LOOKS if before[name] != after[name]}


@contextmanager
def a_thread() -> Iterator[None]:
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait)
    thread.start()
    yield
    goes_on.set()
    thread.join()


@contextmanager
def a_signal_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda *args: None)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def a_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def an_open_file() -> Iterator[None]:
    with open(__file__):
        yield


@contextmanager
def a_tensor() -> Iterator[None]:
    kept = [torch.zeros(1)]
    yield
    kept.clear()


@contextmanager
def a_child_process() -> Iterator[None]:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        yield
        child.communicate(b"\n")


@contextmanager
def a_warning_filter() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def a_variable() -> Iterator[None]:
    os.environ["DRIVETRAIN_LEAK"] = "1"
    yield
    del os.environ["DRIVETRAIN_LEAK"]


@contextmanager
def another_directory() -> Iterator[None]:
    before = os.getcwd()
    os.chdir(os.path.dirname(__file__) or "..")
    yield
    os.chdir(before)


@contextmanager
def a_log_handler() -> Iterator[None]:
    logger, handler = logging.getLogger("drivetrain.leak"), logging.NullHandler()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@contextmanager
def an_exception_hook() -> Iterator[None]:
    before, sys.excepthook = sys.excepthook, lambda *args: None
    yield
    sys.excepthook = before


LEAKS = {
    "threads": a_thread,
    "signals": a_signal_handler,
    "process group": a_process_group,
    "files": an_open_file,
    "tensors": a_tensor,
    "children": a_child_process,
    "warning filters": a_warning_filter,
    "environment": a_variable,
    "working directory": another_directory,
    "log handlers": a_log_handler,
    "hooks": an_exception_hook,
}


@pytest.mark.parametrize("kind", LEAKS)
def test_each_kind_of_leak_is_seen(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    if kind == "files" and open_files() is None:
        pytest.skip("this system has no /proc/self/fd, so open files are not counted")
    if kind == "process group" and not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    monkeypatch.chdir(tmp_path)
    before = look()
    with LEAKS[kind]():
        assert kind in changed(before, look())
    assert kind not in changed(before, look())


@pytest.mark.parametrize(
    ("name", "leak"),
    [
        ("deterministic", lambda: torch.use_deterministic_algorithms(True)),
        ("deterministic, warn only", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("anomaly", lambda: torch.autograd.set_detect_anomaly(True)),
        ("gradients", lambda: torch.set_grad_enabled(False)),
        ("autocast", lambda: torch.set_autocast_enabled("cpu", True)),
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("cudnn.benchmark", lambda: setattr(torch.backends.cudnn, "benchmark", True)),
        ("matmul precision", lambda: torch.set_float32_matmul_precision("medium")),
    ],
)
def test_each_switch_that_stays_is_seen(name: str, leak: Callable[[], Any]) -> None:
    before = look()
    try:
        leak()
        old, new = changed(before, look())["switches"]
        assert old[name] != new[name]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # without which torch 2.9's get_default_device() raises after None
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
    assert "switches" not in changed(before, look())


# ---- a sweep ---------------------------------------------------------------------------------------------------------


# arguments of the Trainer beside those of `one_run`, and the module
RUNS: list[tuple[dict[str, Any], Callable[[], Net]]] = [
    ({}, Net),
    ({"enable_progress_bar": True, "enable_model_summary": True}, Net),
    ({"val_check_interval": 1, "enable_checkpointing": False}, Net),
    ({}, lambda: Net("training")),
    ({"enable_progress_bar": True}, lambda: Net("validation", KeyboardInterrupt)),
    ({"precision": "16-mixed", "accumulate_grad_batches": 2}, Net),
    ({"precision": "64-true", "inference_mode": False}, Net),
    ({}, ByHand),
    ({"deterministic": True, "benchmark": True, "detect_anomaly": True, "max_time": {"minutes": 5}}, Net),
    ({"fast_dev_run": True, "enable_progress_bar": True}, Net),
]
REFUSED: list[dict[str, Any]] = [{"max_epoch": 1}, {"logger": "tensorbord"}, {"precision": "bf16-mix"}]


def one_run(path: Path, index: int) -> tuple[weakref.ref[Trainer], weakref.ref[Net]]:
    """Make a Trainer and use it up; every kind of run meets every kind of logger and of loader."""
    arguments, make = RUNS[index % len(RUNS)]
    loggers: dict[int, Any] = {0: True, 1: CSVLogger(path), 2: [CSVLogger(path), TensorBoardLogger(path)], 3: False}
    quiet = {
        "accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, "default_root_dir": path,
        "enable_progress_bar": False, "enable_model_summary": False, "logger": loggers[index // len(RUNS) % 4],
        "callbacks": [EarlyStopping("loss", strict=False)][: index % 2],
    }  # fmt: skip
    trainer, module = Trainer(**{**quiet, **arguments}), make()
    workers = 1 if index in (0, 3, 24) else 0  # one that succeeds, one that fails, one that is interrupted
    loader = DataLoader(DATASET, batch_size=4, num_workers=workers)
    try:
        trainer.fit(module, loader, DataLoader(DATASET, batch_size=4))
        evaluated = DataLoader(DATASET, batch_size=4)
        for entry in (trainer.validate, trainer.test, trainer.predict)[: index % 4]:
            entry(module, evaluated)
    except (Failing, SystemExit):
        assert module.fails
    else:
        assert not module.fails
        assert trainer.current_epoch == 1
    return weakref.ref(trainer), weakref.ref(module)


def _let_torch_set_itself_up() -> None:
    """What torch changes in a process for good, when it is first asked: its own doing, without any Trainer."""
    assert len(list(DataLoader(DATASET, num_workers=1))) == len(DATASET)  # handles SIGCHLD from now on
    torch.use_deterministic_algorithms(True)  # imports its compiler, with a variable and a warning filter
    torch.use_deterministic_algorithms(False)
    importlib.import_module("sympy")  # adds a warning filter; torch 2.9 imports it in the first fit
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(timeout=0.5)  # one that an earlier test has left and that is about to end


@pytest.mark.filterwarnings("ignore:EarlyStopping watches")
def test_fifty_trainers_leave_nothing_behind(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.chdir(tmp_path)
    _let_torch_set_itself_up()
    untouched = look()
    for index in range(len(RUNS)):
        one_run(tmp_path, index)
    one_run(tmp_path, 2 * len(RUNS))
    before = look()
    found = changed(untouched, before)
    assert set(found) <= {"tensors", "files"}, found  # of those, torch keeps some from the first run
    alive = []
    for index in range(50):
        alive += one_run(tmp_path / str(index), index)
        with pytest.raises(ValueError, match="Did you mean"):
            Trainer(**REFUSED[index % len(REFUSED)])
    after = look()
    assert changed(before, after) == {}
    assert [reference() for reference in alive] == [None] * 100
    assert not list(tmp_path.rglob("*.part"))
