"""A process's report on its own failure, for the process that watches the ranks. This file is imported without
torch.
"""

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
        when: the time of the failure, in seconds of the machine's clock, which shows which process failed first.
        summary: what happened, as text that follows the process's name.
        cure: what to do about the failure, if known.
        follows: whether the failure seems to follow from another process's failure.
        interrupted: whether Ctrl-C caused the failure.
        traceback: the traceback of the process's exception, as text.
        exception: the pickled exception; empty if there is none, or if it cannot be pickled.
    """

    when: float
    summary: str
    cure: str = ""
    follows: bool = False
    interrupted: bool = False
    traceback: str = ""
    exception: bytes = b""

    def cause(self) -> BaseException | None:
        """Return the exception with its traceback, or only the traceback if the exception cannot be unpickled."""
        if not self.traceback:
            return None
        trace = RemoteTraceback(self.traceback)
        # a traceback without frames only repeats the exception
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
    """Return the failure of the process with this local rank; ``None`` if the process has written no report."""
    try:
        failure: Failure = pickle.loads((folder / f"{local_rank}.failure").read_bytes())
    except FileNotFoundError:
        return None
    return failure


def first_of(failures: Mapping[int, Failure]) -> int:
    """Return the rank that failed first. A failure that another rank caused counts only if all failures are of this
    kind.
    """
    return min(failures, key=lambda rank: (failures[rank].follows, failures[rank].when))
