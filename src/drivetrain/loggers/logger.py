"""The base class of loggers, which the Trainer calls with the logged numbers of a run; and the registry of loggers."""

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
    """Base class of loggers, which get plain floats, at most a few times a second and only on global rank 0.

    To add a logger, write a subclass in a file of its own, in this folder or in a package. A program may also register
    a class with ``LoggerRegistry.register("name", cls)``. Import the library that the logger uses when the logger first
    writes, not when its file is imported.
    """

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """The text between a logger's prefix and the name of a value."""

    experiment: Any
    """The object of the library that the logger uses, for programs that call the library directly. A logger of your own
    need not have it.
    """

    group_separator: str = "/"
    """The text between the parts of a name that a callback logs, as in ``lr-SGD/momentum``."""

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
        """The version of the run, which differs from that of the experiment's other runs."""

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
        """The folder of this run, below which checkpoints are saved; ``None`` if there is none."""
        return None

    sub_dir: str | None = None
    """The name of a folder inside the run's folder, if this logger writes into one."""

    @property
    def is_undecided(self) -> bool:
        """Whether there is no run yet: :attr:`version` is unknown, or is chosen only when the attribute is read."""
        return False

    @property
    def numbers_runs(self) -> bool:
        """Whether each run gets a new version, and therefore a new folder."""
        return False

    def continue_run(self, state: Mapping[str, Any], path: str) -> None:
        """Continue the run of a checkpoint instead of beginning a new one. Called before the parts of a run are
        created, if the fit resumes from the newest checkpoint of its program.

        Args:
            state: the result of :meth:`state_dict` in that checkpoint; empty if the checkpoint was not read yet.
            path: the path of the checkpoint.
        """

    def begin_run(self) -> None:
        """Begin the run now if a service determines the run's version. Called in every process when a fit begins.

        After that, :meth:`agree_on_run` is called, so that all ranks have the same run.
        """

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Take over the run of rank 0. Called in every process as soon as the processes are connected.

        Args:
            broadcast: a function that returns, on every process, the argument that rank 0 passed.
        """

    def leave_run(self) -> None:
        """Called before this process starts the processes that train, because this process itself will not write to the
        logger.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's state for a checkpoint as plain data, so that a resumed fit continues the run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint; ``state`` is a result of :meth:`state_dict`. Called before a value is
        logged.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the position on the x axis. In a fit, ``step`` counts the trained batches
        from 0; the batches that are accumulated for one optimizer step count as one.
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
        """Write the recorded values to the file or send them to the service."""

    def finalize(self, status: str) -> None:
        """Called when the run has ended: ``"success"`` or ``"failed"``. Write the remaining values and close open
        files.
        """

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called when ``checkpoint_callback``, a :class:`~drivetrain.callback.Checkpoint`, has written a checkpoint."""


LoggerRegistry: Registry[Logger] = Registry("drivetrain.loggers", "logger", "logger")
"""The loggers by name: those in this folder, those that programs have registered, and those of installed packages."""


def logger_named(name: str, save_dir: str | os.PathLike[str]) -> Logger:
    """Return a new logger of the class that is registered under ``name``. The class gets ``save_dir`` if it has an
    argument of this name.

    Raises:
        UnknownNameError: the name is unknown.
    """
    entry = LoggerRegistry.entry(name)
    takes_folder = "save_dir" in inspect.signature(entry.cls).parameters
    folder = {"save_dir": save_dir} if takes_folder else {}
    return entry.cls(**{**folder, **entry.init_params})
