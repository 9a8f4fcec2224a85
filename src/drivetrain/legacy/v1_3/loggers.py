"""Several loggers as one: ``trainer.logger`` for a Trainer with a list of loggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from drivetrain.loggers.logger import Logger


class LoggerCollection(Logger):
    """Passes every call on to each of ``loggers``; ``logger[0]`` and iteration return them.

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
        """The loggers' own experiment objects."""
        return [logger.experiment for logger in self]

    @property
    def name(self) -> str:
        """The loggers' names, joined."""
        return "_".join(str(logger.name) for logger in self)

    @property
    def version(self) -> str:
        """The loggers' versions, joined."""
        return "_".join(str(logger.version) for logger in self)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for logger in self:
            logger.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        for logger in self:
            logger.log_hyperparams(params, *args, **kwargs)

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        for logger in self:
            logger.log_graph(*args, **kwargs)

    def save(self) -> None:
        for logger in self:
            logger.save()

    def finalize(self, status: str) -> None:
        for logger in self:
            logger.finalize(status)


def as_one(loggers: Sequence[Any]) -> Any:
    """Return the logger, a collection of several, or ``None``."""
    return LoggerCollection(loggers) if len(loggers) > 1 else next(iter(loggers), None)
