"""The logger of ``fast_dev_run``: it discards everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.loggers.logger import Logger


class DummyLogger(Logger):
    """Takes everything and writes nothing, so that a program may call its loggers in ``fast_dev_run`` as well.

    Args:
        save_dir: ignored; every default logger takes one.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        self.experiment: Any = _Nothing()

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Drop them."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Drop them."""


class _Nothing:
    """Has every attribute and may be called: all of it is nothing again."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)  # copying and pickling ask for these, and must not be answered
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self
