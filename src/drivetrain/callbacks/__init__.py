"""Callbacks: one file for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.callback import Callback, Checkpoint
    from drivetrain.callbacks.batch_size_finder import BatchSizeFinder
    from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor
    from drivetrain.callbacks.early_stopping import EarlyStopping
    from drivetrain.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from drivetrain.callbacks.gradient_accumulation import GradientAccumulationScheduler
    from drivetrain.callbacks.lambda_function import LambdaCallback
    from drivetrain.callbacks.lr_finder import LearningRateFinder
    from drivetrain.callbacks.lr_monitor import LearningRateMonitor
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.callbacks.model_summary import ModelSummary
    from drivetrain.callbacks.non_finite import TerminateOnNaN
    from drivetrain.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from drivetrain.callbacks.plain_progress import PlainProgressBar
    from drivetrain.callbacks.prediction_writer import BasePredictionWriter
    from drivetrain.callbacks.progress_bar import ProgressBar
    from drivetrain.callbacks.pruning import ModelPruning
    from drivetrain.callbacks.rich_model_summary import RichModelSummary
    from drivetrain.callbacks.rich_progress import RichProgressBar
    from drivetrain.callbacks.spike import SpikeDetection
    from drivetrain.callbacks.stochastic_weight_avg import StochasticWeightAveraging
    from drivetrain.callbacks.throughput_monitor import ThroughputMonitor
    from drivetrain.callbacks.timer import Timer
    from drivetrain.callbacks.tqdm_progress import TQDMProgressBar
    from drivetrain.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PlainProgressBar",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

_FILES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "Callback": ".callback",
    "Checkpoint": ".callback",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "LambdaCallback": "lambda_function",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PlainProgressBar": "plain_progress",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "rich_progress",
    "SpikeDetection": "spike",
    "StochasticWeightAveraging": "stochastic_weight_avg",
    "TQDMProgressBar": "tqdm_progress",
    "TerminateOnNaN": "non_finite",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _FILES)
