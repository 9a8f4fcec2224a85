"""Log metrics to a CSV file."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.base import files
from drivetrain.base.introspect import calls
from drivetrain.base.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.errors import arguments_checked, check_count
from drivetrain.loggers._folder import FolderLogger

Row = dict[str, Any]

_LOCK_PATIENCE_S = 0.5  # one write takes about a millisecond


class CSVLogger(FolderLogger):
    """Writes ``metrics.csv`` and ``hparams.yaml`` in the folder ``<save_dir>/<name>/version_<n>``.

    A row contains a step and the values of this step. Each new name adds a column. Consecutive calls for one step write
    to one row. If a name gets another value for this step, a new row begins. With the ``version`` of an existing run,
    the logger continues the table of this run. A resumed fit logs the steps after the checkpoint again. Their old rows
    move to ``metrics_replaced.csv``. If another logger writes to the same table, this logger warns, and the table keeps
    the rows of both. Between two writes, no file is open, and no thread runs.

    Args:
        save_dir: the root folder, or an address such as ``s3://bucket/runs``: see docs/remote.md.
        name: the experiment's folder below ``save_dir``; "": no such folder.
        version: a number, a folder name, or ``None`` for the next free number.
        prefix: a text in front of every column's name except ``step``, followed by a hyphen.
        flush_logs_every_n_steps: after how many steps to write rows to the file. Rows are also written at each
            checkpoint and at the end of the run.

    Raises:
        ConfigurationError: ``flush_logs_every_n_steps`` is below 1, or ``version`` has a wrong type.
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
        check_count("CSVLogger", "flush_logs_every_n_steps", flush_logs_every_n_steps, lowest=1, otherwise=100)
        self._flush_every = flush_logs_every_n_steps
        self._flushed_at: int | None = None  # the first step that is not written to the file
        self._columns: list[str] = []
        self._columns_in_file: list[str] = []
        # The rows to write to the file from byte `_offset` on. The last row stays here after a write, because later
        # calls may add values to it.
        self._rows: list[Row] = []
        self._offset = 0
        self._rows_before = 0  # how many rows the file has before byte `_offset`
        self._opened = False
        self._dirty = False
        self._left: tuple[int, ...] | None = None  # what `_identity` returned after this logger's last write
        self._row_in_file: Row = {}  # the last row in the file
        self._shared = False
        self._found: Row = {}  # the last row of the table that is continued; {} unless all values are numbers
        self._resumes_at: dict[str, Any] = {}  # the checkpoint's state; {} from the next logged value on

    @property
    def metrics_file_path(self) -> str:
        """The path of the table. The file is created when rows are first written."""
        return os.path.join(self.log_dir, "metrics.csv")

    @property
    def _table(self) -> str:
        """The table's local path. For a run at an address, this file is uploaded."""
        return os.path.join(here, "metrics.csv") if (here := self._here) != self.log_dir else self.metrics_file_path

    @property
    def experiment(self) -> CSVExperiment:
        """An object with ``log_metrics``, ``log_hparams``, ``save`` and ``add_scalar``, which writes the files."""
        return CSVExperiment(self)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the table, by default at the step after the last row."""
        self._open()
        if self._resumes_at:
            state, self._resumes_at = self._resumes_at, {}
            self._take_rows_back(**state)
        if step is None:
            step = int(self._rows[-1]["step"]) + 1 if self._rows else 0
        values = {name: _plain(value) for name, value in self._named(metrics).items() if name != "step"}
        row = {"step": step, **values}
        if not self._rows and row.items() <= self._found.items():
            return  # a resumed run logs the checkpoint's step again
        last = self._rows[-1] if self._rows else {}
        if last.get("step") == step and all(last.get(name, value) == value for name, value in values.items()):
            last.update(values)
        else:
            self._rows.append(row)
        self._columns += [name for name in values if name not in self._columns]
        self._dirty = True
        if self._flushed_at is None:
            self._flushed_at = step
        # abs, because a second run with this logger starts again at step 0
        if abs(step - self._flushed_at) + 1 >= self._flush_every:
            self._flushed_at = step + 1
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Write ``params``, a mapping or a namespace, to ``hparams.yaml``. Later values replace earlier ones."""
        self._keep_hparams(params)
        self._write_hparams()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's folder, the last row of the table, and the number of rows before this row."""
        last = dict(self._rows[-1]) if self._rows else {}
        now = {"rows": self._rows_before + len(self._rows) - bool(last), "last": last} if self._opened else {}
        return {**self._place(), **(self._resumes_at or now)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the table after the last row in ``state``, if the table has it. Later rows move to
        ``metrics_replaced.csv`` when the next value is logged.
        """
        is_same = self._continues or state.get("folder") == self._place().get("folder", "")
        if "rows" in state and (is_same or (state["last"] and not self.numbers_runs)):
            self._resumes_at = {"rows": int(state["rows"]), "last": {**state["last"]}}

    @rank_zero_only
    def save(self) -> None:
        """Write the remaining rows and hyperparameters."""
        self._save()
        self._upload()

    def _save(self) -> None:
        self._write_hparams()
        if not self._dirty:
            if not self.is_undecided:
                # save() is also called when a fit starts: an unusable folder then raises an error before training.
                self._open()
            return
        self._make_folder()
        table = self._table
        with _writing_alone(os.path.dirname(table)):
            # Another process of this run may have written the table.
            if self._fetch("metrics.csv"):
                self._keep_unwritten_rows()
                self._left = _identity(table)
            found = _identity(table)
            if self._left != found:
                self._continue_changed_table(deleted=found is None)
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
        """Write the remaining rows and hyperparameters."""
        self.save()
        self._upload(releases=True)

    def _open(self) -> None:
        """Before the first row, read an existing table, so that new rows follow its rows."""
        if self._opened:
            return
        self._opened = True
        with self._explained(self.log_dir):
            self._fetch("metrics.csv")
            self._left = _identity(self._table)
            self._read_table()
            if self._offset:
                with open(self._table, "rb") as file:
                    self._found = _row(self._columns_in_file, file.read(self._offset).splitlines()[-1])

    def _read_table(self) -> None:
        """Read the table's columns, and where its last row ends."""
        own, self._columns, self._columns_in_file, self._offset, self._rows_before = self._columns, ["step"], [], 0, 0
        with contextlib.suppress(FileNotFoundError), open(self._table, "rb") as file:
            content = file.read()
            # After a crash, the last line may have no newline. It is left out.
            self._offset = content.rfind(b"\n") + 1
            text = content[: self._offset].decode(errors="backslashreplace")
            lines = csv.reader(io.StringIO(text, newline=""))
            self._columns_in_file = next(lines, [])
            self._rows_before = sum(map(bool, lines))
            self._columns = [*self._columns_in_file]
            if "step" not in self._columns:
                self._columns.insert(0, "step")
        self._columns += [name for name in own if name not in self._columns]

    def _take_rows_back(self, rows: int, last: Row) -> None:
        """Keep the first ``rows`` rows of the table and, unless ``last`` is empty, the next row, which must have the
        step of ``last``. Move the other rows to ``metrics_replaced.csv``. If a row to keep is missing, do not change
        the table.
        """
        self._save()
        table = self._table
        if not os.path.exists(table):
            return
        with _writing_alone(os.path.dirname(table)):
            with open(table, encoding="utf-8", errors="backslashreplace", newline="") as file:
                columns, *texts = filter(None, csv.reader(file))
            own = dict(zip(columns, texts[rows], strict=False)) if rows < len(texts) else {}
            is_other = last and (own.get("step") != str(last["step"]) or not last.keys() <= set(columns))
            if is_other or len(texts) < rows:
                return
            if behind := texts[rows + bool(last) :]:
                self._fetch("metrics_replaced.csv")
                with open(os.path.join(os.path.dirname(table), "metrics_replaced.csv"), "ab") as replaced:
                    replaced.write(_encode([columns, *behind]))
            before = _encode([columns, *texts[:rows]])
            lines = [_encode([[last.get(name, "") for name in columns]])] if last else []
            files.write(table, before + b"".join(lines))
            self._rows, self._rows_before, self._left = [last] if last else [], rows, _identity(table)
            self._found = _row(columns, _encode(texts[rows - 1 : rows]))
            self._written(lines, len(before))

    def _continue_changed_table(self, deleted: bool) -> None:
        """Continue after the rows of another logger. If the table was ``deleted``, start a new one."""
        if deleted:
            rank_zero_warn(
                f"{self.metrics_file_path} was deleted, and the rows in it are lost. CSVLogger begins a new table. "
                "Do not delete the folder of a run that is under way."
            )
            self._hparams_written = not self.hparams
            self._write_hparams()
        elif not self._shared:
            self._shared = True
            rank_zero_warn(
                f"Another logger writes to {self.metrics_file_path} as well. The table keeps the rows of both. "
                "Give each run a version of its own, or leave version out."
            )
        self._keep_unwritten_rows()

    def _keep_unwritten_rows(self) -> None:
        """Read the table again. Drop values from memory that it already contains."""
        self._read_table()
        if self._row_in_file and self._rows:
            first, written = self._rows[0], self._row_in_file
            grown = {name: value for name, value in first.items() if name not in written}
            self._rows[:1] = [{"step": first["step"], **grown}] if grown else []
        self._row_in_file = {}

    def _widened(self) -> bytes:
        """Return the file's content before `_offset`, with the new columns."""
        if not self._offset:
            return _encode([self._columns])
        with open(self._table, "rb") as file:
            content = file.read(self._offset)
        known = len(self._columns_in_file)
        if self._columns[:known] == self._columns_in_file and not any(
            mark in content for mark in (b'"', b"\r", b"\n\n")
        ):
            # Only add commas to each row, because parsing the table for each new name could take hours.
            rows = content[content.index(b"\n") + 1 :]
            return _encode([self._columns]) + rows.replace(b"\n", b"," * (len(self._columns) - known) + b"\n")
        old = csv.DictReader(io.StringIO(content.decode(errors="backslashreplace"), newline=""))
        return _encode([self._columns, *([row.get(name, "") for name in self._columns] for row in old)])

    def _write_rows(self, file: Any, offset: int) -> None:
        lines = self._lines()
        file.seek(offset)
        try:
            file.write(b"".join(lines))
            file.truncate()
            file.flush()  # a full disk raises an error here, while the rows are still in memory
        except OSError as error:
            path = self.metrics_file_path
            raise OSError(error.errno, f"{files.reason(error, Path(path))}. Rows before it are kept", path) from error
        self._written(lines, offset)

    def _lines(self) -> list[bytes]:
        return [_encode([[row.get(name, "") for name in self._columns]]) for row in self._rows]

    def _written(self, lines: list[bytes], offset: int) -> None:
        """Note that ``lines`` were written at ``offset``. Keep only the last row in memory, because later calls may add
        values to it.
        """
        self._offset = offset + sum(map(len, lines[:-1]))
        self._rows_before += max(len(lines) - 1, 0)
        del self._rows[:-1]
        self._row_in_file = dict(self._rows[-1]) if self._rows else {}


class CSVExperiment:
    """``logger.experiment`` of a :class:`CSVLogger`: writes to the logger's files, only on rank 0.

    Attributes:
        log_dir: the folder of the files.
        metrics_file_path: the table.
        hparams: the hyperparameters so far.
        metrics: the rows that are not yet written to the table.
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

    log_hparams = calls("_logger.log_hyperparams")
    """Store hyperparameters."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Add one number. The arguments are those of TensorBoard's ``SummaryWriter.add_scalar``."""
        self._logger.log_metrics({tag: scalar_value}, global_step)

    save = calls("_logger.save")
    """Write the remaining rows and hyperparameters."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"CSVLogger.experiment has no {name}: it writes numbers and hyperparameters. For pictures and histograms "
            "write Trainer(logger=TensorBoardLogger(...)) or Trainer(logger=WandbLogger(...))."
        )


@contextlib.contextmanager
def _writing_alone(folder: str) -> Iterator[None]:
    """Hold a lock on the folder against loggers in other processes. Do nothing on a file system without locks."""
    unlock = files.locked(folder, _LOCK_PATIENCE_S)
    try:
        yield
    finally:
        unlock()


def _identity(path: str) -> tuple[int, ...] | None:
    """Return a value that changes when another process writes the file; ``None`` if there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _row(columns: list[str], line: bytes) -> Row:
    """Return the numbers in a line of the table by column; if a value is no number, an empty dictionary."""
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
    """Convert a number, a tensor or a numpy scalar to a Python number."""
    return value if type(value) is int else float(value)
