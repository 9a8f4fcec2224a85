"""The base class of profilers, which measure named actions of a run."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info
from drivetrain.base.registry import Registry
from drivetrain.errors import ConfigurationError, NotSupportedError

if TYPE_CHECKING:
    from torch import nn

_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
"""Characters that some systems do not allow in a file's name."""


class Profiler(ABC):
    """Base class of profilers, which measure actions: an action begins with :meth:`start` and ends with :meth:`stop`.

    The Trainer calls these methods around the parts of a run, and :meth:`describe` when the run ends. docs/profilers.md
    lists the names of the parts. User code can add more actions: ``with self.trainer.profiler.profile("augment"):``.

    To add a profiler, write a subclass with :meth:`start` and :meth:`stop` in a new file, in this folder or in a
    package.

    Args:
        dirpath: the folder of the profiler's files; ``None``: the folder of the run's logger.
        filename: a part of the names of the files. ``None``: the report is printed.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        if dirpath is not None and files.is_remote(folder := files.spelled(dirpath)):
            raise NotSupportedError(
                f"{type(self).__name__}(dirpath={folder!r}) is an address, and profilers write to local folders. "
                'Write dirpath="profiles", and copy the folder when the run has ended.'
            )
        self._dirpath = dirpath
        self.filename = filename
        self._stage: str | None = None
        self._log_dir: str | None = None
        self._local_rank: int | None = None

    @property
    def dirpath(self) -> str | os.PathLike[str] | None:
        """The user's folder, or else the folder of the last run's logger; ``None`` before the first run."""
        return self._log_dir if self._dirpath is None else self._dirpath

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        self._dirpath = dirpath

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine; 0 before the first run."""
        return self._local_rank or 0

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End an action."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Return a context that measures the code inside it as one action."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when a run begins.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: this process's rank on its machine; ``None`` if the run has only one process.
            log_dir: the folder for files if there is no ``dirpath``.
        """
        self._stage, self._log_dir, self._local_rank = stage, log_dir, local_rank

    def watch(self, module: nn.Module) -> None:
        """Called after :meth:`setup`, so that a profiler can measure the layers of ``module``."""

    def summary(self) -> str:
        """Return the report as text; "" without a report."""
        return ""

    def describe(self) -> None:
        """Print the report. With a ``filename``, write the report to a file of this process instead."""
        if not (report := self.summary()):
            return
        if self.filename is None:
            rank_zero_info(report)
        else:
            files.write(self._path(".txt"), f"{report}\n".encode())

    def teardown(self, stage: str | None) -> None:
        """Free resources. Called when the run has ended or failed."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stage": None}

    def _path(self, extension: str, *parts: str) -> str:
        """Return the path ``<folder>/<stage>-<filename>[-<rank>][-<parts>]<extension>``, and create its folder.

        With several processes, the path contains the global rank.
        """
        folder = files.spelled(self.dirpath or os.getcwd())
        if files.is_remote(folder):
            rank_zero_info(f"{type(self).__name__} writes to {os.getcwd()}, because {folder} is no local folder.")
            folder = os.getcwd()
        os.makedirs(folder, exist_ok=True)
        rank = None if self._local_rank is None else str(rank_from_environ())
        names = "-".join(name for name in (self._stage, self.filename, rank, *parts) if name)
        return os.path.join(folder, _FORBIDDEN.sub("_", names) + extension)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: ``title``, ``header`` and ``rows``. The first column is aligned to the left, and all
    other columns to the right.
    """
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, rule, line(header), rule, *map(line, rows), rule])


def already_running(profiler: Profiler, action_name: str) -> ConfigurationError:
    """Return the error for starting an action that is already running."""
    return ConfigurationError(
        f"{type(profiler).__name__}.start({action_name!r}): this action has begun and not ended. Call "
        f"stop({action_name!r}) before, or give the inner one another name."
    )


def not_running(profiler: Profiler, action_name: str) -> ConfigurationError:
    """Return the error for stopping an action that is not running."""
    return ConfigurationError(
        f"{type(profiler).__name__}.stop({action_name!r}): this action has not begun. Call start({action_name!r}) "
        "before."
    )


ProfilerRegistry: Registry[Profiler] = Registry("drivetrain.profilers", "profiler", "profiler")
"""The profilers by name: the profilers of drivetrain, of users, and of installed packages."""
