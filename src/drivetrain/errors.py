"""Every exception this package raises on purpose, and how its message is built.

::

    DrivetrainError
    ├── ConfigurationError (also a ValueError)   a wrong argument, or arguments that contradict each other
    │   └── NotSupportedError                    a legal argument that this version cannot honour yet
    ├── LoggingError                             self.log called wrongly
    └── CheckpointError                          a checkpoint that cannot be written, read or applied

A message says the cause, the value and the cure, in this order, and its last sentence is what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DrivetrainError(Exception):
    """Root of the tree: ``except DrivetrainError`` catches what this package diagnosed itself."""


class ConfigurationError(DrivetrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other. Raised before anything is built."""


class NotSupportedError(ConfigurationError):
    """The argument is legal vocabulary, but this version has no implementation behind it."""


class LoggingError(DrivetrainError):
    """``self.log`` was called in a hook, with a value or with options that it cannot serve."""


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written, read or applied."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown name: the likeliest known one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."
