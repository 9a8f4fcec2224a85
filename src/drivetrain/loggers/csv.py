"""Log metrics to a CSV file."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.errors import arguments_checked, is_count, wrong_value
from drivetrain.loggers._folder import FolderLogger

Row = dict[str, Any]

_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.01  # a write takes a millisecond


class CSVLogger(FolderLogger):
    """Writes ``<save_dir>/<name>/version_<n>/metrics.csv``, and ``hparams.yaml`` beside it.

    A row holds the step and what was logged there; a name that first appears later widens the table. Consecutive
    calls for one step share a row as long as no name has two values. A table that is already there, because a
    ``version`` was given, is continued. Where another logger writes to the same table at the same time, the table
    keeps the rows of both, and a warning says so. Between two writes no file is open and no thread runs.

    Args:
        save_dir: the root folder, or an address such as ``s3://bucket/runs``: see docs/remote.md.
        name: the experiment's folder below it; empty for none.
        version: a number, a folder name, or ``None`` for the next free number.
        prefix: put before every column but ``step``, joined by a hyphen.
        flush_logs_every_n_steps: rows are written once they span this many steps, and whenever a checkpoint or the
            end of the run asks for it.

    Raises:
        ConfigurationError: ``flush_logs_every_n_steps`` is below 1, or ``version`` is of another type.
    """

    @arguments_checked
    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if not is_count(flush_logs_every_n_steps, 1):
            raise wrong_value(
                "CSVLogger",
                "flush_logs_every_n_steps",
                flush_logs_every_n_steps,
                "an int of at least 1",
                "flush_logs_every_n_steps=100",
                (int,),
            )
        self._flush_every = flush_logs_every_n_steps
        self._flushed_at: int | None = None  # the step at which the current span of unwritten steps began
        self._columns: list[str] = []
        self._columns_in_file: list[str] = []
        # The rows from byte `_offset` of the file on. After a write the last one stays, since it may still grow.
        self._rows: list[Row] = []
        self._offset = 0
        self._opened = False
        self._dirty = False
        self._left: tuple[int, ...] | None = None  # what the file was like after this logger's last write
        self._row_in_file: Row = {}  # the last row as it was written then
        self._shared = False
        self._found: Row = {}  # the last row of the table that was there already

    @property
    def metrics_file_path(self) -> str:
        """Where the table is, or will be."""
        return os.path.join(self.log_dir, "metrics.csv")

    @property
    def _table(self) -> str:
        """The table that this process writes; for a run at an address it is uploaded from there."""
        return os.path.join(here, "metrics.csv") if (here := self._here) != self.log_dir else self.metrics_file_path

    @property
    def experiment(self) -> CSVExperiment:
        """What writes the files: ``log_metrics``, ``log_hparams`` and ``save``, and ``add_scalar``."""
        return CSVExperiment(self)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the table; ``step=None`` means one more than in the last row."""
        self._open()
        if step is None:
            step = int(self._rows[-1]["step"]) + 1 if self._rows else 0
        values = {name: _plain(value) for name, value in self._named(metrics).items() if name != "step"}
        row = {"step": step, **values}
        if not self._rows and row.items() <= self._found.items():
            return  # a resumed run logs the values of the moment of saving again
        last = self._rows[-1] if self._rows else {}
        if last.get("step") == step and all(last.get(name, value) == value for name, value in values.items()):
            last.update(values)
        else:
            self._rows.append(row)
        self._columns += [name for name in values if name not in self._columns]
        self._dirty = True
        if self._flushed_at is None:
            self._flushed_at = step
        # abs: a second run of the same logger starts at step 0 again
        if abs(step - self._flushed_at) + 1 >= self._flush_every:
            self._flushed_at = step + 1
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Keep ``params``, a mapping or a namespace, for ``hparams.yaml``; later values replace earlier ones."""
        self._keep_hparams(params)

    @rank_zero_only
    def save(self) -> None:
        """Write what is not in the files yet."""
        self._save()
        self._upload()

    def _save(self) -> None:
        self._write_hparams()
        if not self._dirty:
            if not self.is_undecided:
                self._open()  # when a fit begins: a folder that cannot be used is an error before training
            return
        self._make_folder()
        table = self._table
        with _writing_alone(os.path.dirname(table)):
            if self._fetch("metrics.csv"):  # another process of this run has written it
                self._keep_unwritten_rows()
                self._left = _identity(table)
            found = _identity(table)
            if self._left is not None and found is None:
                self._begin_anew()
            elif self._left != found:
                self._continue_behind_others()
            try:
                self._write_table(table)
            finally:
                self._left = _identity(table)
        self._dirty = False

    def _write_table(self, table: str) -> None:
        if self._columns == self._columns_in_file:
            with open(table, "r+b") as file:
                self._write_rows(file, self._offset)
        else:
            earlier, lines = self._widened(), self._lines()
            files.write(table, earlier + b"".join(lines))
            self._columns_in_file = list(self._columns)
            self._written(lines, len(earlier))

    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()
        self._upload_and_release()

    def _open(self) -> None:
        """Continue the table that is already there, if there is one."""
        if self._opened:
            return
        self._opened = True
        with self._explained(self.log_dir):
            self._fetch("metrics.csv")
            self._left = _identity(self._table)
            self._read_table()
            self._found = self._last_row()

    def _last_row(self) -> Row:
        """Return the numbers in the last row of the table; empty if there is none, or if it holds anything else."""
        if not self._offset:
            return {}
        with open(self._table, "rb") as file:
            line = file.read(self._offset).splitlines()[-1]
        return _row(self._columns_in_file, line)

    def _read_table(self) -> None:
        """Take over the columns of the table, and its end."""
        own, self._columns, self._columns_in_file, self._offset = self._columns, ["step"], [], 0
        with contextlib.suppress(FileNotFoundError), open(self._table, "rb") as file:
            content = file.read()
            self._offset = content.rfind(b"\n") + 1  # a last line without its end was cut off by a crash
            text = content[: self._offset].decode(errors="backslashreplace")
            self._columns_in_file = next(csv.reader(io.StringIO(text, newline="")), [])
            self._columns = [*self._columns_in_file]
            if "step" not in self._columns:
                self._columns.insert(0, "step")
        self._columns += [name for name in own if name not in self._columns]

    def _begin_anew(self) -> None:
        """The table was deleted since the last write: begin another one with the rows that are not written yet."""
        rank_zero_warn(
            f"{self.metrics_file_path} was deleted, and the rows in it are lost. CSVLogger begins a new table. "
            "Do not delete the folder of a run that is under way."
        )
        self._keep_unwritten_rows()
        self._hparams_written = not self.hparams
        self._write_hparams()

    def _continue_behind_others(self) -> None:
        """Another logger has changed the table since: write behind its rows, and replace none of them."""
        if not self._shared:
            self._shared = True
            rank_zero_warn(
                f"Another logger writes to {self.metrics_file_path} as well. The table keeps the rows of both. "
                "Give each run a version of its own, or leave version out."
            )
        self._keep_unwritten_rows()

    def _keep_unwritten_rows(self) -> None:
        """Read the table as it is now, and keep of the own rows what is not in it."""
        self._read_table()
        if self._row_in_file and self._rows:
            first, written = self._rows[0], self._row_in_file
            grown = {name: value for name, value in first.items() if name not in written}
            self._rows[:1] = [{"step": first["step"], **grown}] if grown else []
        self._row_in_file = {}

    def _widened(self) -> bytes:
        """Return the part of the file before `_offset`, under the new header."""
        lines: list[list[Any]] = []
        if self._offset:
            with open(self._table, "rb") as file:
                text = file.read(self._offset).decode(errors="backslashreplace")
            old = csv.DictReader(io.StringIO(text, newline=""))
            lines = [[row.get(name, "") for name in self._columns] for row in old]
        return _encode([self._columns, *lines])

    def _write_rows(self, file: Any, offset: int) -> None:
        lines = self._lines()
        file.seek(offset)
        try:
            file.write(b"".join(lines))
            file.truncate()
            file.flush()  # a full disk is noticed here, while the rows are still kept
        except OSError as error:
            path = self.metrics_file_path
            raise OSError(error.errno, f"{files.reason(error, Path(path))}. Rows before it are kept", path) from error
        self._written(lines, offset)

    def _lines(self) -> list[bytes]:
        return [_encode([[row.get(name, "") for name in self._columns]]) for row in self._rows]

    def _written(self, lines: list[bytes], offset: int) -> None:
        """The rows are in the file from ``offset`` on: keep only the last one, which may still grow."""
        self._offset = offset + sum(map(len, lines[:-1]))
        del self._rows[:-1]
        self._row_in_file = dict(self._rows[-1]) if self._rows else {}


class CSVExperiment:
    """The files of a :class:`CSVLogger`, for code that writes to ``logger.experiment``; on rank 0 only.

    Attributes:
        log_dir: their folder.
        metrics_file_path: the table.
        hparams: the hyperparameters so far.
        metrics: the rows that are not in the table yet.
        metrics_keys: the table's columns.
    """

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"
    NAME_METRICS_FILE: ClassVar[str] = "metrics.csv"

    def __init__(self, logger: CSVLogger) -> None:
        self._logger = logger
        self.log_dir, self.metrics_file_path = logger.log_dir, logger.metrics_file_path
        self.hparams = logger.hparams

    def log_metrics(self, metrics_dict: Mapping[str, float], step: int | None = None) -> None:
        """Add a row to the table."""
        self._logger.log_metrics(metrics_dict, step)

    @property
    def metrics(self) -> list[Row]:
        return [dict(row) for row in self._logger._rows if row != self._logger._row_in_file]

    @property
    def metrics_keys(self) -> list[str]:
        return list(self._logger._columns_in_file)

    def log_hparams(self, params: Any) -> None:
        """Keep hyperparameters."""
        self._logger.log_hyperparams(params)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Add one number, as TensorBoard's writer does."""
        self._logger.log_metrics({tag: scalar_value}, global_step)

    def save(self) -> None:
        """Write what is not in the files yet."""
        self._logger.save()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"CSVLogger.experiment has no {name}: it writes numbers and hyperparameters. For pictures and histograms "
            "write Trainer(logger=TensorBoardLogger(...)) or Trainer(logger=WandbLogger(...))."
        )


@contextlib.contextmanager
def _writing_alone(folder: str) -> Iterator[None]:
    """Context that loggers of other processes wait for, where the file system can lock a folder.

    The lock ends with the process, so that a killed run leaves none behind.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows
        yield
        return
    try:
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_PAUSE_S)  # a stopped process must not stop this one: in the end it continues without
        yield
    finally:
        os.close(handle)


def _identity(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is written by another process; ``None`` where there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _row(columns: list[str], line: bytes) -> Row:
    """Return the numbers in a line of the table; empty if it holds anything else."""
    try:
        texts = next(csv.reader([line.decode()]), [])
        row: Row = {
            name: int(text) if text.removeprefix("-").isdecimal() else float(text)
            for name, text in zip(columns, texts, strict=True)
            if text
        }
    except ValueError:
        return {}
    return row


def _encode(lines: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def _plain(value: Any) -> int | float:
    """Return numbers as Python writes them; a user may pass a tensor or a numpy scalar."""
    return value if type(value) is int else float(value)
