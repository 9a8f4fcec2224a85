"""What may be attached to a run: one file per callback."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.callback import Callback, Checkpoint
    from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor
    from drivetrain.callbacks.early_stopping import EarlyStopping
    from drivetrain.callbacks.gradient_accumulation import GradientAccumulationScheduler
    from drivetrain.callbacks.lambda_function import LambdaCallback
    from drivetrain.callbacks.lr_monitor import LearningRateMonitor
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.callbacks.model_summary import ModelSummary
    from drivetrain.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from drivetrain.callbacks.plain_progress import PlainProgressBar
    from drivetrain.callbacks.prediction_writer import BasePredictionWriter
    from drivetrain.callbacks.progress_bar import ProgressBar
    from drivetrain.callbacks.rich_model_summary import RichModelSummary
    from drivetrain.callbacks.rich_progress import RichProgressBar
    from drivetrain.callbacks.timer import Timer
    from drivetrain.callbacks.tqdm_progress import TQDMProgressBar

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PlainProgressBar",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
    "Timer",
]

_FILES = {
    "BasePredictionWriter": "drivetrain.callbacks.prediction_writer",
    "Callback": "drivetrain.callback",
    "Checkpoint": "drivetrain.callback",
    "DeviceStatsMonitor": "drivetrain.callbacks.device_stats_monitor",
    "EarlyStopping": "drivetrain.callbacks.early_stopping",
    "GradientAccumulationScheduler": "drivetrain.callbacks.gradient_accumulation",
    "LambdaCallback": "drivetrain.callbacks.lambda_function",
    "LearningRateMonitor": "drivetrain.callbacks.lr_monitor",
    "ModelCheckpoint": "drivetrain.callbacks.model_checkpoint",
    "ModelSummary": "drivetrain.callbacks.model_summary",
    "OnExceptionCheckpoint": "drivetrain.callbacks.on_exception_checkpoint",
    "PlainProgressBar": "drivetrain.callbacks.plain_progress",
    "ProgressBar": "drivetrain.callbacks.progress_bar",
    "RichModelSummary": "drivetrain.callbacks.rich_model_summary",
    "RichProgressBar": "drivetrain.callbacks.rich_progress",
    "TQDMProgressBar": "drivetrain.callbacks.tqdm_progress",
    "Timer": "drivetrain.callbacks.timer",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        from drivetrain.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_FILES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
