"""Records: what a process had in memory at each optimizer step, appended to one file per start and rank."""

from __future__ import annotations

import base64
import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "DRIVETRAIN_PROOF"
"""The environment variable with the JSON that tells a program's process what to record, and at which step to die."""

OPERATIONS = "operations.json"
"""The file with the operations of one step."""

Step = dict[str, Any]
"""One record, as JSON: the parts of the state, see ``Recorder``, and the names of the tensors in each."""


class Writer:
    """Appends records to a file, each with one system call, so that a SIGKILL loses none that is complete."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._names: dict[str, list[str]] = {}

    def write(self, kind: str, step: Step, names: dict[str, list[str]]) -> None:
        """Append ``step``; the names of its tensors only when they have changed."""
        changed = {part: each for part, each in names.items() if self._names.get(part) != each}
        self._names.update(changed)
        line = {"kind": kind, **({"names": changed} if changed else {}), **step}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())


@dataclass
class Start:
    """What one process has recorded from its start to its end or its death.

    Attributes:
        steps: one record for each optimizer step, with the state before the step.
        end: the record of the state when the process ended by itself; ``None`` if it was killed.
        rows: the values that the program's loggers got: name, value, and the step under which it was logged.
    """

    steps: list[Step] = field(default_factory=list)
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Step | None = None


def path_of(folder: str | Path, start: int, rank: int) -> Path:
    """Return the file of a rank's records in the run's ``start``-th start, from 0."""
    return Path(folder) / f"start-{start:02d}.rank-{rank}.jsonl"


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
    return sorted({int(path.stem.rpartition("-")[2]) for path in Path(folder).glob("start-*.rank-*.jsonl")})


def packed(fingerprints: list[int]) -> str:
    """Return 64-bit fingerprints as text."""
    return base64.b64encode(array("q", fingerprints).tobytes()).decode()


def unpacked(text: str) -> list[int]:
    """Return the fingerprints that :func:`packed` has written."""
    return list(array("q", base64.b64decode(text)))
