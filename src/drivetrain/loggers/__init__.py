"""Where the numbers of a run go: one file per destination."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.loggers.csv import CSVLogger
    from drivetrain.loggers.dummy import DummyLogger
    from drivetrain.loggers.logger import Logger
    from drivetrain.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "TensorBoardLogger"]

_FILES = {"CSVLogger": "csv", "DummyLogger": "dummy", "Logger": "logger", "TensorBoardLogger": "tensorboard"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        from drivetrain.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
