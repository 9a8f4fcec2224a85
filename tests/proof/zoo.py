"""The programs of this folder, and a judge of them that shares nothing with ``drivetrain prove-resume``.

The judge runs a program undisturbed, then kills it before chosen prints of a step and starts it again, and compares
what both printed, the weights that they end with, and their log files.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
RESUME_ARGUMENTS = {"resume_argument": "--resume last.pt"}
"""What a program needs on its command line to resume, by the program's name."""

RIGHT = sorted(path.stem for path in PROGRAMS.glob("*.py"))
"""Programs that resume exactly."""

FAULTS = {
    ("shuffled", "sampler_seed"): "batch",
    ("shuffled", "shuffled_twice"): "batch",
    ("workers", "worker_state"): "batch",
    ("scheduler", "scheduler"): "hyperparameter: lr",
    ("scheduler", "optimizer"): "optimizer state",
    ("scaler", "scaler"): "gradient scaler",
    ("dropout_bf16", "dropout"): "random state: of torch",
    ("ema_averaged", "ema"): "a module AveragedModel",
    ("accumulate", "gradient_window"): "gradients: '0.weight'",
    ("tensorboard_log", "logger_step"): "logged row: 'loss'",
    ("csv_log", "logger_step"): "file: metrics.csv",
    ("ema_by_hand", "ema"): "file: checkpoint.pt: 'average/",
    ("early_stopping", "best_metric"): "number of steps",
    ("plain_sgd", "step"): "inputs of the model",
    ("batch_norm", "buffers"): "buffers",
    ("new_model", "buffers"): "buffers",
    ("carried_state", "hidden"): "inputs of the model",
    ("gan", "second_optimizer"): "optimizer state",
    ("numpy_random", "numpy"): "batch",
    ("iterable", "stream"): "batch",
    ("two_nets", "prefix"): "parameters: '0.weight' and 3 more of 8",
}
"""Planted faults, each a program and its ``--fault``, and how the first difference begins that a prover must name."""

SEEN_AFTER_THE_STEPS = ("logged row", "file", "number of steps")
"""Differences that show in what a run leaves behind, and not at the first step after a resume."""


def lives(programs: Any, name: str, folder: Path, kills: Iterable[int], *arguments: str) -> list[str]:
    """Run a program in a folder until it ends, killed before these prints; return all the lines of steps."""
    folder.mkdir()
    printed: list[str] = []
    for number, kill in enumerate([*kills, 0]):
        resume = RESUME_ARGUMENTS.get(name, "").split() if number else []
        program = (HERE / "killed.py", str(kill), PROGRAMS / f"{name}.py", *arguments, *resume)
        ended = programs.run(*program, cwd=folder)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        printed += [line for line in ended.stdout.splitlines() if line.startswith(("step ", "validated "))]
        if ended.returncode == 0:
            return printed
    raise AssertionError(f"{name} was killed by something else")


def differences(undisturbed: list[str], disturbed: list[str], first: Path, second: Path) -> list[str]:
    """Return what differs between a run and one that was killed: lines, weights, log files; empty if nothing does."""
    known = {" ".join(line.split()[:2]): line for line in undisturbed}
    found = [line for line in disturbed if line not in known.values()]
    found += [f"{key} is missing" for key in known if not any(line.startswith(f"{key} ") for line in disturbed)]
    if not same(torch.load(first / "final.pt"), torch.load(second / "final.pt")):
        found.append("final.pt")
    return found + [file for file, rows in logged(first).items() if rows != logged(second).get(file)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def logged(folder: Path) -> dict[str, Any]:
    """Return the rows of the log files in a folder, by file."""
    files = [*folder.rglob("metrics.csv"), *folder.rglob("*.jsonl")]
    rows: dict[str, Any] = {str(path.relative_to(folder)): path.read_text() for path in files}
    if (folder / "tb").exists():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        scalars = EventAccumulator(str(folder / "tb")).Reload().Scalars("loss")
        rows["tb"] = [(each.step, each.value) for each in scalars]
    return rows
