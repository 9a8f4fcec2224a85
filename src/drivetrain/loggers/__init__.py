"""Loggers: one file per destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.loggers.csv import CSVLogger
    from drivetrain.loggers.dummy import DummyLogger
    from drivetrain.loggers.logger import Logger, LoggerRegistry
    from drivetrain.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "LoggerRegistry", "TensorBoardLogger"]

_FILES = {
    "CSVLogger": "csv",
    "DummyLogger": "dummy",
    "Logger": "logger",
    "LoggerRegistry": "logger",
    "TensorBoardLogger": "tensorboard",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _FILES)
