"""Records of the state of a process at each optimizer step, appended to one file per process."""

from __future__ import annotations

import base64
import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "DRIVETRAIN_PROOF"
"""The environment variable with the recorder's arguments, as JSON."""

OPERATIONS = "operations.json"
"""The name of the file with the recorded torch operations of one step."""

Step = dict[str, Any]
"""One record, as JSON: the parts of the state (see ``Recorder``), and for each part the names of the tensors."""


class Writer:
    """Appends records to a file, each with one system call. A SIGKILL cannot lose an appended record."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._names: dict[str, list[str]] = {}

    def write(self, kind: str, step: Step, names: dict[str, list[str]]) -> None:
        """Append ``step``. The names of a part's tensors are written only if these names have changed since the last
        record.
        """
        changed = {part: each for part, each in names.items() if self._names.get(part) != each}
        self._names.update(changed)
        line = {"kind": kind, **({"names": changed} if changed else {}), **step}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())


@dataclass
class Start:
    """The records of one process, from its start until its end or its kill.

    Attributes:
        steps: one record for each optimizer step, with the state before the step.
        end: the record of the final state, if the process ended by itself; ``None`` if the process was killed.
        rows: the values that the program's loggers got. Each row has the name, the value, and the step of the value.
    """

    steps: list[Step] = field(default_factory=list)
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Step | None = None


def path_of(folder: str | Path, start: int, rank: int, forked: int | str = "") -> Path:
    """Return the path of the file with the records that a rank writes in one start of the program.

    Args:
        folder: the run's folder of records.
        start: the number of the start. The first start has number 0.
        rank: the rank.
        forked: if the program has forked the process, the process's number (pid).
    """
    return Path(folder) / f"start-{start:02d}.rank-{rank}{f'.forked-{forked}' if forked else ''}.jsonl"


def forked_of(folder: str | Path, start: int, rank: int) -> list[Path]:
    """Return the files of the forked processes that have made steps as ``rank``."""
    return list(Path(folder).glob(path_of("", start, rank, "*").name))


def start_of(folder: str | Path, start: int, rank: int) -> Start:
    """Return the records of a rank in one start. If the rank made no step, the returned :class:`Start` is empty.

    If the started process made no step, the steps of all forked processes are returned, in the order of the processes'
    first steps.
    """
    path, found = path_of(folder, start, rank), Start()
    parts = [read(each) for each in ([path] if path.exists() else forked_of(folder, start, rank))]
    for part in sorted(parts, key=lambda part: [step["time"] for step in part.steps[:1]]):
        found.steps += part.steps
        found.rows += part.rows
        found.end = part.end
    return found


def read(path: Path) -> Start:
    """Read a file of records. The end of the process may have cut off a line: that line is left out."""
    found = Start()
    names: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue
        names = step["names"] = {**names, **step["names"]} if "names" in step else names
        kind = step.pop("kind")
        if kind == "row":
            found.rows.append(tuple(step["row"]))
        elif kind == "end":
            found.end = step
        else:
            found.steps.append(step)
    return found


def ranks_of(folder: str | Path) -> list[int]:
    """Return the ranks that have written a record in ``folder``."""
    names = (path.name.split(".")[1] for path in Path(folder).glob("start-*.rank-*.jsonl"))
    return sorted({int(name.removeprefix("rank-")) for name in names})


def packed(fingerprints: list[int]) -> str:
    """Return 64-bit fingerprints as text."""
    return base64.b64encode(array("q", fingerprints).tobytes()).decode()


def unpacked(text: str) -> list[int]:
    """Return the fingerprints that :func:`packed` has written."""
    return list(array("q", base64.b64decode(text)))
