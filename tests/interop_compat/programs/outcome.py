"""What the programs of this folder share: a program trains one or more models and prints their numbers as JSON.

``PROGRAM FOLDER [SEED [MODEL ...]]`` writes its logs and checkpoints below ``FOLDER``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


def report(**models: Callable[[Path, int], dict[str, Any]]) -> None:
    """Train each model that the command line names, by default all, and print what was found."""
    folder, seed, *names = [*sys.argv[1:], "7"] if len(sys.argv) == 2 else sys.argv[1:]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        numbers = {name: models[name](Path(folder) / name, int(seed)) for name in names or models}
    messages = sorted({str(warning.message) for warning in warned})
    print()  # a progress bar may have left its line open
    print(json.dumps({"trainer": pl.Trainer.__module__, "numbers": numbers, "warnings": messages}))


def metrics(trainer: Any) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}


def ended(trainer: Any) -> list[int]:
    return [trainer.global_step, trainer.current_epoch]


def norm(module: torch.nn.Module) -> float:
    """The sum of the norms of all parameters."""
    return sum(float(weight.detach().double().norm()) for weight in module.parameters())
