"""Choose the observers that watch a run."""

from __future__ import annotations

from typing import Any

from drivetrain.advice.data import DataWatch
from drivetrain.advice.losses import LogWatch, LossWatch
from drivetrain.advice.model import ModelWatch
from drivetrain.advice.steps import AutomaticWatch, LimitsWatch, ManualWatch
from drivetrain.loops.run import Run


def observers_of(run: Run, predictions: Any) -> list[Any]:
    """Return the observers of ``run``; called after the run's set-up. ``predictions`` is the object that collects the
    results of ``predict_step``.
    """
    automatic = run.module.automatic_optimization
    found: list[Any] = [LimitsWatch(run), ModelWatch(run), DataWatch(run, predictions), LogWatch(run)]
    found.append(AutomaticWatch(run) if automatic else ManualWatch(run))
    if automatic and run.engine.strategy.optimizers:
        found.append(LossWatch(run))
    return found
