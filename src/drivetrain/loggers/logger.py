"""The contract of a logger: where the flushed numbers of a run go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class Logger(ABC):
    """Receives plain floats, a few times a second at most, on global rank 0 only.

    A new logger is a new file in this folder with one such class. The library behind it is imported when the logger
    first writes, never when the file is imported.
    """

    group_separator: str = "/"
    """Between the parts of a name that a callback builds, for example ``lr-SGD/momentum``."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""

    @property
    def save_dir(self) -> str | None:
        """The root folder that was given, or ``None`` for a logger that keeps no files here."""
        return None

    @property
    def log_dir(self) -> str | None:
        """This run's own folder, or ``None``; checkpoints go below it."""
        return None

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Let this process mean the run that rank 0 writes (trap T30); called in every process, when they have met.

        Args:
            broadcast: gives every process rank 0's value.
        """

    def leave_run(self) -> None:
        """This process starts others that run the program, and writes nothing itself; called before they start."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step`` (the logger's x axis: batches on which an optimizer step happened)."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the run's hyperparameters."""

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the model's graph; most loggers have no place for one."""

    def save(self) -> None:
        """Make what was recorded so far durable."""

    def finalize(self, status: str) -> None:
        """The run ended: ``"success"`` or ``"failed"``. Write what is left and close what is open."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint was written, by this callback: a :class:`~drivetrain.callback.Checkpoint`."""
