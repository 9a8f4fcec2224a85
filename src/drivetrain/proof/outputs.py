"""Compare the files that two runs have written. Checkpoints are compared tensor by tensor, tables row by row."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from drivetrain.base.digest import digest
from drivetrain.checkpoints.foreign import is_container, read_objects
from drivetrain.cli import checkpoint_safetensors
from drivetrain.cli.checkpoint_kinds import leaves
from drivetrain.errors import DrivetrainError
from drivetrain.proof.judge import OF_TIME
from drivetrain.report import run_file

Row = dict[str, str]
Cells = tuple[tuple[str, str], ...]
Column = tuple[str, str]
"""A key for values in files: the name of the file, and the name of a column. In a checkpoint, each tensor or number is
a column.
"""

_TABLES = (".csv", ".tsv", ".jsonl", ".json")
_VERSION = re.compile(r"(?:^|/)(version_\d+)/")
_RANDOM = re.compile(r"rng|random|generator", re.IGNORECASE)


class Written(NamedTuple):
    """The differences between the files of two runs.

    Attributes:
        different: a line of text for each file in which the killed run has a value that the undisturbed run lacks.
        columns: the columns of these values.
        lacking: a line of text for each file that the killed run lacks, and for each file in which the killed run lacks
            rows.
    """

    different: list[str]
    columns: set[Column]
    lacking: list[str]


def compare(one: Path, other: Path, before: Path, ignored: Collection[Column] = ()) -> Written:
    """Compare the files that two runs of a program have written.

    The comparison ignores the order of rows, and repeated rows, because a restarted run may write rows again.

    Args:
        one: the folder of the undisturbed run.
        other: the folder of the run that was killed.
        before: the folder of which both folders are copies.
        ignored: columns that are not compared.
    """
    found = Written([], set(), [])
    for path in sorted(one.rglob("*")):
        name = path.relative_to(one).as_posix()
        if path.is_symlink() or not path.is_file() or _is_same(path, before / name) or _RANDOM.search(path.name):
            continue
        if (rows := _rows(path, one)) is None:
            continue
        counterpart = _counterpart(name, one, other, before)
        others = _rows(counterpart, other) if counterpart.is_file() else None
        if others is None:
            found.lacking.append(name)
            continue
        common = {column for row in rows for column in row} & {column for row in others for column in row}
        common -= {column for column in common if (name, column) in ignored}
        known, made = (Counter(tuple(sorted(_only(row, common))) for row in each) for each in (rows, others))
        if extra := [row for row in made if row not in known]:
            nearest = max(known, key=lambda row: _likeness(row, extra[0]))
            columns = [column for column, _ in set(extra[0]) - set(nearest)] or [column for column, _ in extra[0]]
            found.columns.update((name, column) for column in columns)
            found.different.append(f"{name}: {_described(extra[0], nearest, len(rows))}")
        elif len(known) > len(made):
            found.lacking.append(f"{len(known) - len(made)} rows of {name}")
    return found


def _counterpart(name: str, one: Path, other: Path, before: Path) -> Path:
    """Return the file of the killed run that is compared with ``name``.

    A logger gives each start a new folder ``version_<n>``. If the undisturbed run has made only one such folder, its
    checkpoint is compared with the newest checkpoint of the same name in the killed run's folders.
    """
    if name.endswith(_TABLES) or not (found := _VERSION.search(name)):
        return other / name
    place, rest = name[: found.start(1)], name[found.end(1) :]
    old = {each.name for each in (before / place).glob("version_*")}
    if len({each.name for each in (one / place).glob("version_*")} - old) > 1:
        return other / name
    made = [Path(f"{each}{rest}") for each in (other / place).glob("version_*") if each.name not in old]
    return max(filter(Path.is_file, made), key=lambda path: path.stat().st_mtime_ns, default=other / name)


def _is_same(path: Path, before: Path) -> bool:
    """Whether the file ``path`` has the size and the modification time of the file ``before``."""
    if not before.exists():
        return False
    now, then = path.stat(), before.stat()
    return (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)


def _only(row: Row, columns: set[str]) -> Iterator[tuple[str, str]]:
    return ((column, value) for column, value in row.items() if column in columns)


def _likeness(row: Cells, other: Cells) -> tuple[int, int]:
    """Return the number of equal cells, and the number of equal cells that are neither steps nor epochs. A row with
    equal values and a different step is a likelier counterpart than a row with different values and the same step.
    """
    equal = set(row) & set(other)
    return len(equal), sum(name not in ("step", "epoch", "iteration") for name, _ in equal)


def _described(row: Cells, nearest: Cells, count: int) -> str:
    old, new = dict(nearest), dict(row)
    name = next((column for column in new if new[column] != old.get(column)), next(iter(new), ""))
    values = "" if old.get(name, "").startswith("tensor") else f", {new.get(name)} instead of {old.get(name)}"
    of = "" if count == 1 else f" in a row {', '.join(f'{key}={value}' for key, value in list(new.items())[:4])}"
    return f"{name!r}{values}{of}"


def _rows(path: Path, run: Path) -> list[Row] | None:
    """Return a file as rows of a table, or ``None`` for an unknown kind of file. A checkpoint is a single row."""
    if path.name == run_file.NAME:
        with suppress(OSError, ValueError):
            run_file.load(path)
            return None  # run.json lists each start, also the killed ones, so it always differs
    try:
        if path.suffix in _TABLES:
            text = path.read_text(encoding="utf-8").replace(str(run), "{run}")
            rows = list(_of_text(text, path.suffix))
        elif path.suffix == ".safetensors":
            rows = [checkpoint_safetensors.read(path)]
        elif is_container(path):
            entries = leaves(read_objects(path, str(path), map_location="cpu"))
            rows = [{name: value for name, value in entries if not (isinstance(value, str) and str(run) in value)}]
        else:
            return None
    except (DrivetrainError, ValueError, OSError, csv.Error):
        return None  # the content does not fit the file's name, or the kill has cut off the content
    return [{name: _shown(value) for name, value in row.items() if _counts(name, value)} for row in rows if row]


def _of_text(text: str, suffix: str) -> Iterator[dict[str, Any]]:
    if suffix == ".json":
        yield dict(leaves(json.loads(text)))
    elif suffix == ".jsonl":
        for line in text.splitlines():
            yield dict(leaves(json.loads(line)))
    else:
        yield from csv.DictReader(text.splitlines(), delimiter="\t" if suffix == ".tsv" else ",")


def _counts(name: str | None, value: Any) -> bool:
    """Whether a value is a result of the training. Times, random states and objects are not results of the training."""
    if name is None or _RANDOM.search(name):
        return False
    if isinstance(value, Tensor):
        return not value.is_meta
    if isinstance(value, list) and any(isinstance(each, str) for each in value):
        return False  # a list of texts may be a command line, which --resume-args changes
    return isinstance(value, (int, float, str, list)) and OF_TIME.search(name) is None


def _shown(value: Any) -> str:
    return f"tensor {digest([value])}" if isinstance(value, Tensor) else str(value)
