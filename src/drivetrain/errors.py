"""The exceptions that drivetrain raises, and functions that build their messages.

::

    DrivetrainError
    ├── ConfigurationError (also a ValueError)   a wrong argument, or arguments that contradict each other
    │   ├── UnknownArgumentError (a TypeError)   an argument that does not exist
    │   ├── UnknownNameError (a KeyError)         nothing is registered under this name
    │   ├── WrongTypeError (a TypeError)          an argument of a type that is not accepted, or a missing model
    │   ├── NotLoggedError (a RuntimeError)       a callback watches a name that was not logged
    │   ├── ConflictError (a RuntimeError)        two parts of a run exclude each other
    │   └── NotSupportedError                    a valid argument that this version does not support yet
    ├── LaunchError (launchers.launcher)         a process of the job failed
    ├── LoggingError                             self.log called wrongly
    │   └── UnloggableError (a ValueError)       a value that cannot be logged
    ├── CheckpointError                          a checkpoint that cannot be written, read or applied
    │   ├── NoCheckpointError (a FileNotFoundError)  there is none at the path
    │   ├── NotSavedError (a ValueError)          no callback has saved the one that is asked for
    │   ├── MismatchError (a RuntimeError)        it holds other names or shapes than the module has
    │   └── MissingEntryError (a KeyError)        it lacks an entry that is asked for
    └── PeerError                                another rank of the job failed, so this one ends too
    SIGTERMException (a SystemExit)              the run ends because it was sent SIGTERM

A message gives the cause, the value and the cure, in this order; its last sentence says what to write instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_REPR = 100  # characters; a model's own text would fill pages


class DrivetrainError(Exception):
    """Base class: ``except DrivetrainError`` catches every error that drivetrain itself detects."""


class ConfigurationError(DrivetrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other. Raised before anything is built."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """There is no argument of this name. Also a TypeError, as Python raises for an unknown argument."""


class UnknownNameError(ConfigurationError, KeyError):
    """Nothing is registered under this name. Also a KeyError, as a failed lookup raises."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class WrongTypeError(ConfigurationError, TypeError):
    """An argument has a type that is not accepted, or the model is missing. Also a TypeError, as Python raises."""


class NotLoggedError(ConfigurationError, RuntimeError):
    """A callback watches a name that was not logged. Also a RuntimeError: only the run shows it."""


class ConflictError(ConfigurationError, RuntimeError):
    """Two parts of a run exclude each other. Also a RuntimeError, as Lightning raises."""


class NotSupportedError(ConfigurationError):
    """The argument is valid in Lightning, but this version does not implement it."""


class LoggingError(DrivetrainError):
    """``self.log`` was called in a hook, with a value or options that are not allowed there."""


class UnloggableError(LoggingError, ValueError):
    """``self.log`` got a value that is no number. Also a ValueError, as Python raises for one."""


class SIGTERMException(SystemExit):
    """The run ends because its process was sent SIGTERM; a program that does not catch it ends with exit code 143."""

    def __init__(self, code: int = 128 + 15) -> None:
        super().__init__(code)


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written, read or applied."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path. Also a FileNotFoundError, as Python raises for a file."""


class NotSavedError(CheckpointError, ValueError):
    """``ckpt_path`` names a checkpoint that no callback has saved. Also a ValueError: the argument does not fit."""


class MismatchError(CheckpointError, RuntimeError):
    """A checkpoint holds other names or shapes than the module has. Also a RuntimeError, as torch raises."""


class MissingEntryError(CheckpointError, KeyError):
    """A checkpoint lacks an entry that is asked for. Also a KeyError, as a failed lookup raises."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class PeerError(DrivetrainError):
    """Another rank of the job has failed, so this one ends too. The message says which, where, and by what."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name most similar to ``word``, ignoring case; ``None`` if none is similar."""
    names = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, then all of them."""
    names = sorted(known)
    close = closest(word, names)
    hint = "" if close is None else f"Did you mean {close!r}? "
    return f"{hint}Known: {', '.join(names) or 'none'}."


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message: in one line, without addresses in memory, and cut if it is long."""
    text = _ADDRESS.sub("", " ".join(repr(value).split()))
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def described(value: Any) -> str:
    """Describe a value of the wrong type: "a str: 'x'", "None", "the class EarlyStopping itself"."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}: {shown(value)}"


def wrong_value(owner: str, name: str, value: Any, expected: str, cure: str) -> ConfigurationError:
    """Return the error for an argument of ``owner`` with a wrong value: what is accepted, and what to write."""
    return ConfigurationError(f"{owner}({name}={shown(value)}): {name} is {expected}. Write {cure}.")


def is_count(value: Any, lowest: int = 0) -> bool:
    """Return whether ``value`` is an int of at least ``lowest``; True is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def count_meant(value: Any, otherwise: int, lowest: int = 0) -> int:
    """Return the int that ``value`` probably stands for, as 3.0 and "3" stand for 3; else ``otherwise``."""
    try:
        whole = None if isinstance(value, bool) or float(value) != int(float(value)) else int(float(value))
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return otherwise if whole is None or whole < lowest else whole


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real number, of Python or numpy, and not NaN; True is not one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def unknown_argument(owner: str, unknown: Mapping[str, Any], known: Iterable[str]) -> UnknownArgumentError:
    """Return the error for arguments that ``owner`` does not have: the first of them, and a similar name."""
    name = next(iter(unknown))
    return UnknownArgumentError(f"{owner} has no argument {name}={shown(unknown[name])}. {did_you_mean(name, known)}")


class NoMore(TypedDict):
    """The type of ``**unknown: Unpack[NoMore]``: a type checker accepts no keyword there."""


def accepts_no_more(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for a function that catches misspelt keywords in a last parameter ``**unknown``, to say so itself.

    The parameter is not part of the function's signature. Unlike :func:`arguments_checked`, this adds no frame to a
    traceback.
    """
    signature = inspect.signature(fn)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fn.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    fn.__annotations__.pop("unknown", None)
    return fn


def arguments_checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for entry points: an unknown argument of ``fn`` raises an error that suggests a similar one.

    Raises:
        UnknownArgumentError: there is no such argument.
    """
    parameters = list(inspect.signature(fn).parameters)[1:]
    name = fn.__qualname__.removesuffix(".__init__")

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for key, value in kwargs.items():
            if key not in parameters:
                raise unknown_argument(name, {key: value}, parameters)
        return fn(*args, **kwargs)

    return checked


def text_of(error: BaseException) -> str:
    """Return what ``error`` says; "" where its own ``__str__`` fails, which must not hide the error itself."""
    try:
        return str(error)
    except Exception:
        return ""
