"""What a process writes about its failure, for the process that watches it. This file is imported without torch."""

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
    """How a process ended that should not have.

    Attributes:
        when: seconds on the machine's clock, to tell which process failed first.
        summary: what it did, to go on after its name.
        cure: what to do about it, if that is known.
        follows: whether it looks like the echo of another process's failure.
        interrupted: whether it was Ctrl-C.
        traceback: of its exception, as text.
        exception: pickled; empty where there is none, or it cannot be.
    """

    when: float
    summary: str
    cure: str = ""
    follows: bool = False
    interrupted: bool = False
    traceback: str = ""
    exception: bytes = b""

    def cause(self) -> BaseException | None:
        """The exception with its traceback; the traceback alone where the exception does not travel."""
        if not self.traceback:
            return None
        trace = RemoteTraceback(self.traceback)
        has_lines = "Traceback (most recent" in self.traceback  # else it repeats the exception
        try:
            exception = pickle.loads(self.exception)
        except Exception:  # some classes cannot be made again from what they pickle
            return trace
        if not isinstance(exception, BaseException):
            return trace
        exception.__cause__ = trace if has_lines else None
        return exception


def read_failure(folder: Path, local_rank: int) -> Failure | None:
    """What that process said about its end; ``None`` where it could say nothing."""
    try:
        failure: Failure = pickle.loads((folder / f"{local_rank}.failure").read_bytes())
    except FileNotFoundError:
        return None
    return failure


def first_of(failures: Mapping[int, Failure]) -> int:
    """Return which of these ranks has failed first, and not because another one had."""
    return min(failures, key=lambda rank: (failures[rank].follows, failures[rank].when))
