"""The base class of loggers, and the registry of loggers. The Trainer passes the logged numbers of a run to loggers."""

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

    To add a logger, write a subclass in a new file, in this folder or in a package. A program can also register a class
    with ``LoggerRegistry.register("name", cls)``. Import the logger's library at the first write, not when the logger's
    file is imported.
    """

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """The text that joins a logger's prefix and the name of a value."""

    experiment: Any
    """The library's object for the run, for programs that call the logger's library directly. This property is
    optional.
    """

    group_separator: str = "/"
    """The text that joins the parts of a callback's logged name, such as "/" in ``lr-SGD/momentum``."""

    keeps_run_record: bool = False
    """Whether the Trainer records each fit in the file ``run.json`` in :attr:`log_dir`, which ``drivetrain report``
    reads.
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the run; each run of an experiment has a different version."""

    @property
    def save_dir(self) -> str | None:
        """The root folder that was passed, or ``None`` for a logger without local files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder with the runs of this experiment, or ``None`` for a logger without local files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run; checkpoints are saved inside this folder; ``None`` if there is no folder."""
        return None

    sub_dir: str | None = None
    """The name of the folder inside the run's folder into which this logger writes; ``None``: the run's folder
    itself.
    """

    @property
    def is_undecided(self) -> bool:
        """Whether there is no run yet: :attr:`version` is unknown, or will be chosen at the first read."""
        return False

    @property
    def numbers_runs(self) -> bool:
        """Whether each run gets a new version, and therefore a new folder."""
        return False

    def continue_run(self, state: Mapping[str, Any], path: str) -> None:
        """Continue the run of a checkpoint instead of a new run. Called before the objects of a run are created, if the
        fit resumes from the program's newest checkpoint.

        Args:
            state: the result of :meth:`state_dict` in the checkpoint; empty if the checkpoint is not read yet.
            path: the path of the checkpoint.
        """

    def begin_run(self) -> None:
        """Begin the run now, if a service chooses the run's version. Called in every process when a fit begins.

        After this method, :meth:`agree_on_run` is called.
        """

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Set this process's run to the run of rank 0. Called in every process when the process group exists.

        Args:
            broadcast: a function that returns rank 0's argument on every rank.
        """

    def leave_run(self) -> None:
        """Called before this process starts the training processes, because only these processes write to the
        logger.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's state for checkpoints, as plain data. With this state, a resumed fit continues the
        run.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint; ``state`` is a result of :meth:`state_dict`. Called before a value is
        logged.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the position on the x axis. In a fit, ``step`` counts training batches from
        0, but all batches of one optimizer step count as one batch.
        """

    @abstractmethod
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record the run's hyperparameters.

        Args:
            params: a mapping or a namespace; ``None`` if there are no new hyperparameters.
            args, kwargs: further arguments of a logger, such as ``metrics`` of a TensorBoardLogger.
        """

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the model's graph. Most loggers do nothing here."""

    def save(self) -> None:
        """Write the recorded values to the file, or send the values to the service."""

    def finalize(self, status: str) -> None:
        """Called after the run, with the status ``"success"`` or ``"failed"``. Write the remaining values and close
        open files.
        """

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called when ``checkpoint_callback``, a :class:`~drivetrain.callback.Checkpoint`, has written a checkpoint."""


LoggerRegistry: Registry[Logger] = Registry("drivetrain.loggers", "logger", "logger")
"""The loggers by name: loggers in this folder, loggers that programs have registered, and loggers in installed
packages.
"""


def logger_named(name: str, save_dir: str | os.PathLike[str]) -> Logger:
    """Return a new logger of the class that is registered under ``name``. The argument ``save_dir`` is passed if the
    class's constructor has this argument.

    Raises:
        UnknownNameError: the name is unknown.
    """
    entry = LoggerRegistry.entry(name)
    takes_folder = "save_dir" in inspect.signature(entry.cls).parameters
    folder = {"save_dir": save_dir} if takes_folder else {}
    return entry.cls(**{**folder, **entry.init_params})
