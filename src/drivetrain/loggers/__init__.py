"""Loggers: one file per destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.loggers.comet import CometLogger
    from drivetrain.loggers.csv import CSVLogger
    from drivetrain.loggers.dummy import DummyLogger
    from drivetrain.loggers.logger import Logger, LoggerRegistry
    from drivetrain.loggers.mlflow import MLFlowLogger
    from drivetrain.loggers.neptune import NeptuneLogger
    from drivetrain.loggers.tensorboard import TensorBoardLogger
    from drivetrain.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger", "CometLogger", "DummyLogger", "Logger", "LoggerRegistry", "MLFlowLogger", "NeptuneLogger",
    "TensorBoardLogger", "WandbLogger",
]  # fmt: skip

_FILES = {
    "CSVLogger": "csv",
    "CometLogger": "comet",
    "DummyLogger": "dummy",
    "Logger": "logger",
    "LoggerRegistry": "logger",
    "MLFlowLogger": "mlflow",
    "NeptuneLogger": "neptune",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _FILES)
