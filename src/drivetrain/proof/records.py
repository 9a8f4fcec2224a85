"""Records: what a process had in memory at each optimizer step, appended to one file per process."""

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
"""One record, as JSON: the parts of the state (see ``Recorder``), and for each part the names of its tensors."""


class Writer:
    """Appends records to a file, each with one system call, so that a SIGKILL cannot lose a record that was
    appended.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._names: dict[str, list[str]] = {}

    def write(self, kind: str, step: Step, names: dict[str, list[str]]) -> None:
        """Append ``step``; write the names of a part's tensors only if they have changed since the last record."""
        changed = {part: each for part, each in names.items() if self._names.get(part) != each}
        self._names.update(changed)
        line = {"kind": kind, **({"names": changed} if changed else {}), **step}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())


@dataclass
class Start:
    """What one process has recorded from its start until it ended or was killed.

    Attributes:
        steps: one record for each optimizer step, with the state before the step.
        end: the record of the state when the process ended by itself; ``None`` if it was killed.
        rows: the values that the program's loggers got: name, value, and the step under which it was logged.
    """

    steps: list[Step] = field(default_factory=list)
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Step | None = None


def path_of(folder: str | Path, start: int, rank: int, forked: int | str = "") -> Path:
    """Return the path of the file with a rank's records of one start of the program; the first start has number 0.

    Args:
        folder: the run's folder of records.
        start: how often the program was started before.
        rank: the rank.
        forked: if the program has forked the process, the process's number (pid).
    """
    return Path(folder) / f"start-{start:02d}.rank-{rank}{f'.forked-{forked}' if forked else ''}.jsonl"


def forked_of(folder: str | Path, start: int, rank: int) -> list[Path]:
    """Return the files of the forked processes that have made steps as ``rank``."""
    return list(Path(folder).glob(path_of("", start, rank, "*").name))


def start_of(folder: str | Path, start: int, rank: int) -> Start:
    """Return the records of a rank in one start; an empty :class:`Start` if the rank made no step.

    Steps of forked processes count only if the started process made none. If more than one forked process
    has made steps, their records are joined in the order of their first steps.
    """
    path, found = path_of(folder, start, rank), Start()
    parts = [read(each) for each in ([path] if path.exists() else forked_of(folder, start, rank))]
    for part in sorted(parts, key=lambda part: [step["time"] for step in part.steps[:1]]):
        found.steps += part.steps
        found.rows += part.rows
        found.end = part.end
    return found


def read(path: Path) -> Start:
    """Read a file of records; a line that was cut by the kill is left out."""
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
    """Return the ranks that have recorded anything in ``folder``."""
    names = (path.name.split(".")[1] for path in Path(folder).glob("start-*.rank-*.jsonl"))
    return sorted({int(name.removeprefix("rank-")) for name in names})


def packed(fingerprints: list[int]) -> str:
    """Return 64-bit fingerprints as text."""
    return base64.b64encode(array("q", fingerprints).tobytes()).decode()


def unpacked(text: str) -> list[int]:
    """Return the fingerprints that :func:`packed` has written."""
    return list(array("q", base64.b64decode(text)))
