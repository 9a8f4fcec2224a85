"""Reads the file ``run.json``, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from drivetrain.base import files

NAME = "run.json"
SCHEMA = 1
"""The version of the file's layout. :func:`load` refuses other versions."""


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a run's record.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no record of a run, or has a different layout.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # reading a named pipe could wait forever
        raise ValueError(f"{path} is not a file")
    try:
        record = json.loads(files.read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a run's record: {error}") from error
    if not isinstance(record, dict) or not isinstance(attempts := record.get("attempts"), list):
        raise ValueError(f"{path} is not a run's record")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"{path} has layout {record.get('schema')!r}, and this version reads {SCHEMA}")
    if not isinstance(record.get("diffs"), dict) or not all(isinstance(each, dict) for each in attempts):
        raise ValueError(f"{path} is not a run's record")
    return record


def plain(value: Any) -> Any:
    """Return ``value`` as data that every JSON reader accepts. NaN and infinity become text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
