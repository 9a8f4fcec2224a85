"""The contract of a logger, where the flushed numbers of a run go; and the registry."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.base.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


class Logger(ABC):
    """Receives plain floats, a few times a second at most, on global rank 0 only.

    A new logger is a new file in this folder, or in a package of its own, with one such class; a program may give its
    class a name with ``LoggerRegistry.register("name", cls)``. The library behind it is imported when the logger
    first writes, never when the file is imported.
    """

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """Between a logger's prefix and the names of its values."""

    experiment: Any
    """The object of the library behind the logger, for programs; a logger of yours may have none."""

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
    def root_dir(self) -> str | None:
        """The folder that holds the runs of this experiment, or ``None`` for a logger that keeps no files here."""
        return None

    @property
    def log_dir(self) -> str | None:
        """This run's own folder, or ``None``; checkpoints go below it."""
        return None

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Let this process mean the run that rank 0 writes; called in every process, when they have met.

        Args:
            broadcast: gives every process rank 0's value.
        """

    def leave_run(self) -> None:
        """This process starts others that run the program, and writes nothing itself; called before they start."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the logger, as plain data, so that a resumed fit continues the run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint, which holds what :meth:`state_dict` returned; before anything is logged."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step`` (the logger's x axis: batches on which an optimizer step happened)."""

    @abstractmethod
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record the run's hyperparameters.

        Args:
            params: a mapping, a namespace, or ``None`` for no more than there are.
            args, kwargs: what a logger takes beside them, such as ``metrics`` of a TensorBoardLogger.
        """

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the model's graph; most loggers have no place for one."""

    def save(self) -> None:
        """Make what was recorded so far durable."""

    def finalize(self, status: str) -> None:
        """The run ended: ``"success"`` or ``"failed"``. Write what is left and close what is open."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint was written, by this callback: a :class:`~drivetrain.callback.Checkpoint`."""


LoggerRegistry: Registry[Logger] = Registry("drivetrain.loggers", "logger", "logger")
"""The loggers by name: the files beside this one, those of users, and those of installed packages."""


def logger_named(name: str, save_dir: str | os.PathLike[str]) -> Logger:
    """Return a new logger of this name, which writes below ``save_dir`` if it keeps files.

    Raises:
        UnknownNameError: there is none.
    """
    entry = LoggerRegistry.entry(name)
    takes_folder = "save_dir" in inspect.signature(entry.cls).parameters
    folder = {"save_dir": save_dir} if takes_folder else {}
    return entry.cls(**{**folder, **entry.init_params})
