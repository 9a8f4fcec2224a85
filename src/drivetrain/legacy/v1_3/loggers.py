"""The type of ``trainer.logger`` for a Trainer with several loggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from drivetrain.loggers.logger import Logger


def _calls_each(name: str) -> Any:
    """Return a method that calls the method ``name`` of each logger."""

    def method(self: LoggerCollection, *args: Any, **kwargs: Any) -> None:
        for logger in self:
            getattr(logger, name)(*args, **kwargs)

    return method


class LoggerCollection(Logger):
    """Passes every call to all ``loggers``; an index or an iteration yields the loggers themselves.

    Args:
        loggers: in order.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        super().__init__()
        self._loggers = list(loggers)

    def __getitem__(self, index: int) -> Any:
        return self._loggers[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loggers)

    def __len__(self) -> int:
        return len(self._loggers)

    @property
    def experiment(self) -> list[Any]:
        """The ``experiment`` of each logger."""
        return [logger.experiment for logger in self]

    @property
    def name(self) -> str:
        """The names of all loggers, joined by "_"."""
        return "_".join(str(logger.name) for logger in self)

    @property
    def version(self) -> str:
        """The versions of all loggers, joined by "_"."""
        return "_".join(str(logger.version) for logger in self)

    log_metrics = _calls_each("log_metrics")
    log_hyperparams = _calls_each("log_hyperparams")
    log_graph = _calls_each("log_graph")
    save = _calls_each("save")
    finalize = _calls_each("finalize")


def as_one(loggers: Sequence[Any]) -> Any:
    """Return a collection of several loggers, a single logger itself, or ``None`` without loggers."""
    return LoggerCollection(loggers) if len(loggers) > 1 else next(iter(loggers), None)
