"""The logger of ``fast_dev_run`` discards all values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.loggers.logger import Logger


class DummyLogger(Logger):
    """Accepts every call and writes nothing, so that a program's calls of loggers work in ``fast_dev_run``.

    The logger has every method that another logger can have: ``logger.log_image(...)`` does nothing.

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
    """An object whose attributes and calls all return the object itself."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle must find no special methods
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
