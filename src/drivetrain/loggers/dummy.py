"""A logger that discards all values, for ``Trainer(fast_dev_run=True)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.loggers.logger import Logger


class DummyLogger(Logger):
    """Replaces the program's loggers in ``fast_dev_run``. It accepts every call and writes nothing.

    It also has the methods of all other loggers: ``logger.log_image(...)`` does nothing.

    Args:
        save_dir: ignored.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        super().__init__()
        self.experiment: Any = Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    name: str = ""
    version: str = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Do nothing."""

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Nothing:
    """An object that returns itself for each attribute and each call."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle look for special methods, and must find none
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getitem__(self, index: Any) -> Nothing:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *args: object) -> None:
        pass
