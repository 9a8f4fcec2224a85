"""The base class of loggers, to which the Trainer passes a run's logged numbers, and the registry of loggers."""

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
    """Base class of loggers.

    The Trainer passes plain floats to loggers, at most a few times a second, on global rank 0.

    To add a logger, write a subclass in a new file of this folder, or in your own code.
    ``LoggerRegistry.register("name", cls)`` gives it a name. Import the library of a service only when the logger first
    writes.
    """

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """The text between a logger's ``prefix`` and the name of a value."""

    experiment: Any
    """The library's object for the run, for programs that call the library itself. A logger may lack this property."""

    group_separator: str = "/"
    """The text that joins the parts of a name, such as "/" in ``lr-SGD/momentum``."""

    keeps_run_record: bool = False
    """Whether the Trainer writes ``run.json`` into :attr:`log_dir`, for ``drivetrain report``."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the run, which differs between the runs of an experiment."""

    @property
    def save_dir(self) -> str | None:
        """The folder that the program has passed; ``None`` for a logger without local files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder with the runs of this experiment; ``None`` for a logger without local files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, in which checkpoints are saved; ``None`` if there is no folder."""
        return None

    sub_dir: str | None = None
    """A subfolder of the run's folder into which this logger writes; ``None``: no subfolder."""

    @property
    def is_undecided(self) -> bool:
        """Whether there is no run yet. :attr:`version` is then unknown, or reading it would choose it."""
        return False

    @property
    def numbers_runs(self) -> bool:
        """Whether each run gets a new version, and therefore a new folder."""
        return False

    def continue_run(self, state: Mapping[str, Any], path: str) -> None:
        """Continue the run of a checkpoint instead of beginning a new run. The Trainer calls this before it sets up a
        fit that resumes from the program's newest checkpoint.

        Args:
            state: the result of :meth:`state_dict` in the checkpoint; empty if the checkpoint is not read yet.
            path: the path of the checkpoint.
        """

    def begin_run(self) -> None:
        """Begin the run, if a service chooses its version. Every process calls this when a fit begins, and then
        :meth:`agree_on_run`.
        """

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Use the run of rank 0. Every process calls this after the process group was created.

        Args:
            broadcast: a function that returns rank 0's argument on every rank.
        """

    def leave_run(self) -> None:
        """Give up the run, because this process will not write. It is called before this process starts the processes
        that train.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's state for checkpoints, as plain data. A resumed fit continues the run with it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint. ``state`` is a result of :meth:`state_dict`. Called before the first value
        is logged.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the position on the x axis. In a fit, ``step`` starts at 0 and counts
        training batches. With gradient accumulation, the batches of an optimizer step count as one.
        """

    @abstractmethod
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record the run's hyperparameters.

        Args:
            params: a mapping or a namespace; ``None`` if there are no new hyperparameters.
            args, kwargs: arguments that only some loggers have, such as ``metrics`` of a TensorBoardLogger.
        """

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the model's graph. Most loggers do nothing here."""

    def save(self) -> None:
        """Write the recorded values to the file, or send them to the service."""

    def finalize(self, status: str) -> None:
        """Write the remaining values, and close open files. Called after the run with the status ``"success"`` or
        ``"failed"``.
        """

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called after ``checkpoint_callback`` (a :class:`~drivetrain.callback.Checkpoint`) has written a
        checkpoint.
        """


LoggerRegistry: Registry[Logger] = Registry("drivetrain.loggers", "logger", "logger")
"""The loggers by name, from this folder, from programs that registered them, and from installed packages."""


def logger_named(name: str, save_dir: str | os.PathLike[str]) -> Logger:
    """Return a new object of the logger class that is registered under ``name``. Pass ``save_dir`` if its constructor
    has this argument.

    Raises:
        UnknownNameError: the name is unknown.
    """
    entry = LoggerRegistry.entry(name)
    takes_folder = "save_dir" in inspect.signature(entry.cls).parameters
    folder = {"save_dir": save_dir} if takes_folder else {}
    return entry.cls(**{**folder, **entry.init_params})
