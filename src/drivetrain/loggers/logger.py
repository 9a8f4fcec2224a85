"""The contract of a logger, which gets the flushed numbers of a run; and the registry."""

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

    A new logger is a new file in this folder, or in a package, with one subclass; a program may register its class with
    ``LoggerRegistry.register("name", cls)``. The logger's library is imported when it first writes, not when the file
    is imported.
    """

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """Joins a logger's prefix and the names of its values."""

    experiment: Any
    """The object of the library behind the logger, for programs; your own logger need not have one."""

    group_separator: str = "/"
    """Joins the parts of a name that a callback builds, for example ``lr-SGD/momentum``."""

    keeps_run_record: bool = False
    """Whether each fit is recorded in ``run.json`` in :attr:`log_dir`, for ``drivetrain report``."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the run in the experiment."""

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
        """The folder of this run, or ``None``; checkpoints are saved below it."""
        return None

    sub_dir: str | None = None
    """The folder inside the run's folder in which this logger writes, if it has one."""

    @property
    def is_undecided(self) -> bool:
        """Whether there is no run yet: :attr:`version` is unknown, or reading it would choose it."""
        return False

    @property
    def numbers_runs(self) -> bool:
        """Whether each run gets its own version, and so its own folder."""
        return False

    def continue_run(self, state: Mapping[str, Any], path: str) -> None:
        """Continue a run instead of numbering a new one; called before anything is built, if a fit resumes from the
        newest checkpoint of its program.

        Args:
            state: the result of :meth:`state_dict` in that checkpoint; empty if it is not known yet.
            path: the path of the checkpoint.
        """

    def begin_run(self) -> None:
        """Begin the run if a service determines its version; called in every process when a fit begins.

        The ranks then agree on the run, with :meth:`agree_on_run`.
        """

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        """Set this process's run to rank 0's; called in every process after the rendezvous.

        Args:
            broadcast: returns rank 0's value on every process.
        """

    def leave_run(self) -> None:
        """Called before this process starts others that run the program; this process then writes nothing itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's state for a checkpoint as plain data, so that a resumed fit continues the run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint, from a result of :meth:`state_dict`; called before anything is logged."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the loggers' x axis: the number of batches with an optimizer step."""

    @abstractmethod
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record the run's hyperparameters.

        Args:
            params: a mapping, a namespace, or ``None`` for no new ones.
            args, kwargs: further arguments of a logger, such as ``metrics`` of a TensorBoardLogger.
        """

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the model's graph; most loggers do not support it."""

    def save(self) -> None:
        """Make the recorded values durable."""

    def finalize(self, status: str) -> None:
        """Called when the run has ended: ``"success"`` or ``"failed"``. Write the remaining values and close open
        files.
        """

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called when this callback, a :class:`~drivetrain.callback.Checkpoint`, has written a checkpoint."""


LoggerRegistry: Registry[Logger] = Registry("drivetrain.loggers", "logger", "logger")
"""The loggers by name: the files beside this one, those of users, and those of installed packages."""


def logger_named(name: str, save_dir: str | os.PathLike[str]) -> Logger:
    """Return a new logger with this name, which writes below ``save_dir`` if it keeps files.

    Raises:
        UnknownNameError: the name is unknown.
    """
    entry = LoggerRegistry.entry(name)
    takes_folder = "save_dir" in inspect.signature(entry.cls).parameters
    folder = {"save_dir": save_dir} if takes_folder else {}
    return entry.cls(**{**folder, **entry.init_params})
