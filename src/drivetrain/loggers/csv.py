"""Metrics as one plain table, which any tool can read."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError, arguments_checked, is_count, shown
from drivetrain.loggers._folder import FolderLogger, write_atomically
from drivetrain.rank_zero import rank_zero_only

Row = dict[str, Any]


class CSVLogger(FolderLogger):
    """Writes ``<save_dir>/<name>/version_<n>/metrics.csv``, and ``hparams.yaml`` beside it.

    A row holds the step and what was logged there; a name that first appears later widens the table. Consecutive
    calls for one step share a row as long as no name has two values. A table that is already there, because a
    ``version`` was given, is continued. Between two writes no file is open and no thread runs.

    Args:
        save_dir: the root folder.
        name: the experiment's folder below it; empty for none.
        version: a number, a folder name, or ``None`` for the next free number.
        prefix: put before every column but ``step``, joined by a hyphen.
        flush_logs_every_n_steps: rows are written once they span this many steps, and whenever a checkpoint or the
            end of the run asks for it.

    Raises:
        ConfigurationError: ``flush_logs_every_n_steps`` is below 1, ``save_dir`` is remote, or ``version`` is of
            another type.
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
            raise ConfigurationError(
                f"CSVLogger got flush_logs_every_n_steps={shown(flush_logs_every_n_steps)}. Pass an int of 1 or more."
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

    @property
    def metrics_file_path(self) -> str:
        """Where the table is, or will be."""
        return os.path.join(self.log_dir, "metrics.csv")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the table; ``step=None`` means one more than in the last row."""
        self._open()
        if step is None:
            step = int(self._rows[-1]["step"]) + 1 if self._rows else 0
        values = {name: _plain(value) for name, value in self._named(metrics).items() if name != "step"}
        last = self._rows[-1] if self._rows else {}
        if last.get("step") == step and all(last.get(name, value) == value for name, value in values.items()):
            last.update(values)
        else:
            self._rows.append({"step": step, **values})
        self._columns += [name for name in values if name not in self._columns]
        self._dirty = True
        if self._flushed_at is None:
            self._flushed_at = step
        # abs: a second run of the same logger starts at step 0 again
        if abs(step - self._flushed_at) + 1 >= self._flush_every:
            self._flushed_at = step + 1
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Keep ``params``, a mapping or a namespace, for ``hparams.yaml``; later values replace earlier ones."""
        self._keep_hparams(params)

    @rank_zero_only
    def save(self) -> None:
        """Write what is not in the files yet."""
        self._write_hparams()
        if not self._dirty:
            return
        os.makedirs(self.log_dir, exist_ok=True)
        if self._columns == self._columns_in_file:
            with open(self.metrics_file_path, "r+b") as file:
                self._write_rows(file, self._offset)
        else:
            table = io.BytesIO(self._widened())
            self._write_rows(table, len(table.getvalue()))
            write_atomically(self.metrics_file_path, table.getvalue())
            self._columns_in_file = list(self._columns)
        self._dirty = False

    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()

    def _open(self) -> None:
        """Take up the table that is already there, if there is one."""
        if self._opened:
            return
        self._opened = True
        self._columns = ["step"]
        try:
            with open(self.metrics_file_path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return
        self._offset = content.rfind(b"\n") + 1  # a last line without its end was cut off by a crash
        lines = csv.reader(io.StringIO(content[: self._offset].decode(), newline=""))
        self._columns_in_file = next(lines, [])
        self._columns = [*self._columns_in_file]
        if "step" not in self._columns:
            self._columns.insert(0, "step")

    def _widened(self) -> bytes:
        """The part of the file before `_offset`, under the new header."""
        lines: list[list[Any]] = []
        if self._offset:
            with open(self.metrics_file_path, "rb") as file:
                text = file.read(self._offset).decode()
            old = csv.DictReader(io.StringIO(text, newline=""))
            lines = [[row.get(name, "") for name in self._columns] for row in old]
        return _encode([self._columns, *lines])

    def _write_rows(self, file: Any, offset: int) -> None:
        """Write the rows from ``offset`` on, and remember where the last one begins."""
        lines = [_encode([[row.get(name, "") for name in self._columns]]) for row in self._rows]
        file.seek(offset)
        file.write(b"".join(lines))
        file.truncate()
        self._offset = offset + sum(map(len, lines[:-1]))
        del self._rows[:-1]


def _encode(lines: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def _plain(value: Any) -> int | float:
    """Numbers as Python writes them; a user may pass a tensor or a numpy scalar."""
    return value if type(value) is int else float(value)
