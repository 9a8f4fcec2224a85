"""A rank's report on its failure, for the process that watches the ranks. This file is imported without torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class RemoteTraceback(Exception):
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """How a failed process ended.

    Attributes:
        when: the time of the failure, in seconds of the machine's monotonic clock.
        summary: what happened, as the end of a sentence that begins with the process's name.
        cure: what the user can do about the failure, or "".
        follows: whether another process's failure seems to be the cause.
        interrupted: whether Ctrl-C caused the failure.
        traceback: the traceback of the process's exception, as text.
        exception: the pickled exception. Empty if there was no exception, or if the exception cannot be pickled.
    """

    when: float
    summary: str
    cure: str = ""
    follows: bool = False
    interrupted: bool = False
    traceback: str = ""
    exception: bytes = b""

    def cause(self) -> BaseException | None:
        """Return the exception with its traceback. If the exception cannot be unpickled, return only the traceback."""
        if not self.traceback:
            return None
        trace = RemoteTraceback(self.traceback)
        # a traceback without frames would only repeat the exception's message
        has_lines = "Traceback (most recent" in self.traceback
        try:
            exception = pickle.loads(self.exception)
        except Exception:  # some exception classes cannot be unpickled
            return trace
        if not isinstance(exception, BaseException):
            return trace
        exception.__cause__ = trace if has_lines else None
        return exception


def read_failure(folder: Path, local_rank: int) -> Failure | None:
    """Return the failure that the process with this local rank has reported, or ``None``."""
    try:
        failure: Failure = pickle.loads((folder / f"{local_rank}.failure").read_bytes())
    except FileNotFoundError:
        return None
    return failure


def first_of(failures: Mapping[int, Failure]) -> int:
    """Return the rank that failed first. Ignore failures that another rank's failure has caused. If there are no
    others, consider them all.
    """
    return min(failures, key=lambda rank: (failures[rank].follows, failures[rank].when))
