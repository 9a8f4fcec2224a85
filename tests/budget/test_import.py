"""Importing must be free of side effects and of heavy packages; how long it takes is in ``benchmarks/``."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("rich", "tqdm", "tensorboard", "psutil", "sklearn", "matplotlib", "torchmetrics", "fsspec", "jsonargparse")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "most"),
    [("import drivetrain", 4), ("from drivetrain import Trainer, LightningModule", 101)],
)
def test_importing_loads_few_modules_and_none_of_the_heavy_ones(statement: str, most: int) -> None:
    code = f"""
import sys, torch
before = set(sys.modules)
{statement}
new = set(sys.modules) - before
print(len(new), *sorted(name for name in new if name.split(".")[0] in {HEAVY!r}))
"""
    count, *heavy = run(code).split()
    assert heavy == []
    assert int(count) <= most


def test_importing_sets_off_no_collection_of_all_objects_and_leaves_the_collector_as_it_was() -> None:
    code = """
import gc, torch
{}
before = gc.get_stats()[2]
from drivetrain import Trainer, LightningModule
print(gc.get_stats()[2] == before, gc.isenabled())
"""
    assert run(code.format("")) == "True True"
    assert run(code.format("gc.disable()")) == "True False"


def test_importing_writes_no_file_opens_no_socket_and_leaves_the_environment_alone() -> None:
    code = """
import os, sys, torch, torch.utils.data, torch.optim.lr_scheduler
events = []
def audit(event, args):
    writes = event == "open" and isinstance(args[1], str) and any(c in args[1] for c in "wax+")
    writes = writes and not isinstance(args[0], int)  # the import system opens files of bytecode by number
    if (writes and "__pycache__" not in str(args[0])) or event.split(".")[0] in ("socket", "subprocess", "shutil"):
        events.append(f"{event}{args}")
sys.addaudithook(audit)
before = dict(os.environ)
import threading
threads = threading.active_count()
import drivetrain
from drivetrain import Callback, Engine, LightningDataModule, LightningModule, Trainer, seed_everything
import drivetrain.accelerators, drivetrain.callbacks, drivetrain.loggers, drivetrain.plugins, drivetrain.strategies
assert dict(os.environ) == before, "the environment changed"
assert threading.active_count() == threads, "a thread was started"
print(events)
"""
    assert run(code) == "[]"
