"""Base class of loggers that write to a folder. It chooses the run's folder, and writes the run's hyperparameters to a
file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.base import files, remote, yaml_text
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info
from drivetrain.errors import ConfigurationError, wrong_value
from drivetrain.loggers._mirror import Mirror
from drivetrain.loggers.logger import Logger

_VERSION = re.compile(r"version_(\d+)")


class FolderLogger(Logger):
    """A logger that writes each run into a folder ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: the root folder, or an address such as ``s3://bucket/runs``; ``~`` and environment variables are
            expanded. For an address, files are written to a temporary folder, and uploaded once a minute and by
            :meth:`save`.
        name: the experiment's folder below ``save_dir``; "" or ``None``: no such folder.
        version: a number, a complete folder name, or ``None`` for the next free number. The logger chooses the number
            when a run starts, or when :attr:`version` or :attr:`log_dir` is first read. Rank 0 creates the folder
            immediately, so no other run gets this number.
        prefix: a text in front of every logged name, followed by a hyphen.

    Raises:
        ConfigurationError: ``name`` or ``version`` has a wrong type, the folder cannot be created, or a package for the
            address is missing.
    """

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"
    keeps_run_record = True

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        super().__init__()
        if not isinstance(save_dir, (str, os.PathLike)):
            raise wrong_value(type(self).__name__, "save_dir", save_dir, "a path", 'save_dir="runs"')
        if version is not None and (isinstance(version, bool) or not isinstance(version, (int, str))):
            expected = "a number, a folder name, or None for the next free number"
            raise wrong_value(type(self).__name__, "version", version, expected, "version=None")
        self._save_dir = os.fspath(save_dir)
        # absolute, because the program may change its working directory
        self._root = _absolute(self._save_dir)
        self._name = name or ""
        self._version = version
        self._is_given = version is not None
        self._made = False  # whether this logger has created the version's folder
        self._continues = False  # whether the version is from a checkpoint
        self._mirror: Mirror | None = None
        self._prefix = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""
        self.hparams: dict[str, Any] = {}
        self._hparams_written = True
        owner = type(self).__name__
        files.check_folder(owner, "save_dir", save_dir, self._root, "runs")
        # not root_dir: it reads ``name``, and a subclass's ``name`` may need attributes that do not exist yet
        named = os.path.join(self._root, self._name)
        files.check_folder(owner, "name", name, named, "lightning_logs")
        if isinstance(version, str):
            files.check_folder(owner, "version", version, os.path.join(named, version), "first")

    @contextlib.contextmanager
    def _explained(self, folder: str) -> Iterator[None]:
        """Context in which an OSError about ``folder`` becomes a ConfigurationError.

        Raises:
            ConfigurationError: the file system raised an error.
        """
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"{type(self).__name__} cannot use the folder {folder}: {files.reason(error, Path(folder))}. "
                "Pass a save_dir in which this process may write."
            ) from error

    @property
    def save_dir(self) -> str:
        """The root folder, as it was passed to the constructor."""
        return self._save_dir

    @property
    def name(self) -> str:
        """The name of the experiment's folder; "" if the runs' folders are in ``save_dir`` itself."""
        return self._name

    @property
    def root_dir(self) -> str:
        """The folder with all runs of the experiment."""
        own = type(self).save_dir is not FolderLogger.save_dir
        root = _absolute(self.save_dir) if own else self._root
        return os.path.join(root, self.name) if self.name else root

    @property
    def _runs_dir(self) -> str:
        """The folder whose subfolders ``version_<n>`` are counted."""
        return self.root_dir

    @property
    def version(self) -> int | str:
        """The version of this run. Reading it for the first time chooses the version, and rank 0 creates the run's
        folder.
        """
        if self._version is None:
            with self._explained(self._runs_dir):
                if rank_from_environ() == 0:
                    self._version, self._made = _make_version(self._runs_dir), True
                else:
                    # only a guess: agree_on_run() sets rank 0's version
                    self._version = _next_version(self._runs_dir)
        return self._version

    @property
    def is_undecided(self) -> bool:
        """Whether the run has no version yet, and therefore no folder."""
        return self._version is None and type(self).version is FolderLogger.version

    @property
    def numbers_runs(self) -> bool:
        """Whether each run gets a new version and a new folder. True if the program passes no version."""
        return not self._is_given and type(self).version is FolderLogger.version

    def continue_run(self, state: Mapping[str, Any], path: str) -> None:
        """Use the version of the checkpoint's run, if this logger's :attr:`root_dir` contains the folder of that
        run.
        """
        if not (self.numbers_runs and self.is_undecided):
            return
        folder, inside = str(state.get("folder", "")), os.path.join(self._runs_dir, "")
        below = _absolute(path).removeprefix(inside)
        # Whether the checkpoint is below `_runs_dir`, also after the user has moved this folder.
        is_here = below != _absolute(path)
        name = os.path.basename(folder) if folder else below.split(os.sep)[0]
        match = _VERSION.fullmatch(name) if is_here or folder == inside + name else None
        with contextlib.suppress(OSError):
            if match is not None and name in files.names(self._runs_dir):
                self._version, self._continues = int(match[1]), True
                rank_zero_info(f"{type(self).__name__} continues {name} in {self._runs_dir}.")

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        self._version = broadcast(self.version if rank_from_environ() == 0 else None)

    def leave_run(self) -> None:
        """Remove the run's folder, if this process has created it and it is empty. The child processes will choose a
        version themselves.
        """
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):  # a folder with files stays
                _remove_version(FolderLogger.log_dir.fget(self))  # type: ignore[attr-defined]
                self._version = None

    @property
    def log_dir(self) -> str:
        """The folder of this run. Reading it chooses the version, if the run has none yet."""
        version = self.version
        return os.path.join(self._runs_dir, version if isinstance(version, str) else f"version_{version}")

    def _place(self) -> dict[str, Any]:
        """Return the entries of the state dict that identify the run."""
        return {} if self.is_undecided else {"folder": FolderLogger.log_dir.fget(self)}  # type: ignore[attr-defined]

    @property
    def _here(self) -> str:
        """The local folder for files: :attr:`log_dir`; if that is an address, a folder whose files are uploaded to
        it.
        """
        folder = self.log_dir
        if not files.is_remote(folder):
            return folder
        if self._mirror is None or self._mirror.address != folder:
            self._mirror = Mirror(folder)
        return self._mirror.folder

    def _fetch(self, name: str) -> bool:
        """Download a file of the run, if the run's folder is at an address and the file has no local copy. Return
        whether it was downloaded.
        """
        return bool(self._here) and self._mirror is not None and self._mirror.fetch(name)

    def _upload(self, releases: bool = False) -> None:
        """Upload changed files, if the run's folder is at an address. With ``releases``, then remove the local
        copies.
        """
        if self._mirror is not None:
            self._mirror.upload()
            if releases:
                self._mirror.release()

    def _make_folder(self) -> None:
        with self._explained(self.log_dir):
            os.makedirs(self._here, exist_ok=True)

    def _look_into_folder(self) -> None:
        """Raise a ConfigurationError if the run's folder exists and cannot be read."""
        with self._explained(self.log_dir), contextlib.suppress(FileNotFoundError):
            if files.is_remote(self.log_dir):
                files.names(self.log_dir)
            else:
                os.stat(os.path.join(self.log_dir, "."))

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {files.encodable(f"{self._prefix}{name}"): value for name, value in metrics.items()}

    def _keep_hparams(self, params: Any) -> None:
        if params is not None:
            # params can be an argparse.Namespace
            self.hparams.update(params if isinstance(params, Mapping) else vars(params))
        self._hparams_written = False

    def _has_hparams_file(self) -> bool:
        path = os.path.join(self._here, self.NAME_HPARAMS_FILE)
        return self._fetch(self.NAME_HPARAMS_FILE) or os.path.exists(path)

    def _write_hparams(self, also_empty: bool = False) -> None:
        """Write ``hparams.yaml`` if the hyperparameters have changed. With ``also_empty``, also write a missing
        file.
        """
        if self._hparams_written and not (also_empty and not self._has_hparams_file()):
            return
        self._make_folder()
        files.write(os.path.join(self._here, self.NAME_HPARAMS_FILE), yaml_text.dump(self.hparams).encode())
        self._hparams_written = True


def _absolute(folder: str) -> str:
    return files.absolute(files.spelled(os.path.expandvars(folder)))


def _make_version(root_dir: str) -> int:
    """Create the folder of the next version, and return its number. Runs that start at the same time get different
    numbers.
    """
    is_remote = files.is_remote(root_dir)
    if not is_remote:
        os.makedirs(root_dir, exist_ok=True)
    version = _next_version(root_dir)
    while True:
        folder = os.path.join(root_dir, f"version_{version}")
        try:
            if is_remote:  # an address cannot have an empty folder, so an empty hparams.yaml reserves the number
                with files.replacing(os.path.join(folder, FolderLogger.NAME_HPARAMS_FILE), new=True) as stream:
                    stream.write(yaml_text.dump({}).encode())
            else:
                os.mkdir(folder)
        except FileExistsError:
            version += 1
        else:
            return version


def _remove_version(folder: str) -> None:
    """Remove a folder of :func:`_make_version` that is still empty.

    Raises:
        OSError: the folder is not empty.
    """
    if not files.is_remote(folder):
        os.rmdir(folder)
        return

    if remote.names(folder) != [FolderLogger.NAME_HPARAMS_FILE]:
        raise OSError(f"{folder} is not empty")
    remote.remove(os.path.join(folder, FolderLogger.NAME_HPARAMS_FILE))
    remote.remove_folder(folder)


def _next_version(root_dir: str) -> int:
    try:
        names = files.names(root_dir)
    except FileNotFoundError:
        return 0
    taken = [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
    return max(taken, default=-1) + 1
