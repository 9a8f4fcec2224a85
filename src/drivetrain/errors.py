"""The exceptions that drivetrain raises, and functions that build the messages of these exceptions.

::

    DrivetrainError
    ├── ConfigurationError (also a ValueError)   a wrong argument, or arguments that contradict each other
    │   ├── UnknownArgumentError (a TypeError)   an argument that does not exist
    │   ├── UnknownNameError (a KeyError)        an unknown name, or a missing key of a dictionary
    │   ├── WrongTypeError (a TypeError)         an argument of a type that is not accepted, or a missing model
    │   ├── SignatureError (a TypeError and a RuntimeError)  a step or a hook that does not accept the loop's arguments
    │   ├── MissingAttributeError (an AttributeError)  an object that lacks a required attribute
    │   ├── MissingPackageError (a ModuleNotFoundError)  an optional package that is not installed
    │   ├── HookError (a NotImplementedError)    a hook that no longer exists, or a required hook that is missing
    │   ├── RunError (a RuntimeError)            parts of a run that do not fit each other, or do not fit the machine
    │   │   └── NotLoggedError                   a monitored name that was not logged
    │   └── NotSupportedError                    a valid argument that this version does not support yet
    ├── LaunchError (launchers.launcher)         a process of the job that has failed
    ├── LoggingError                             a wrong call of self.log
    │   ├── LogNameError (a TypeError)           a name that is reserved or not a string
    │   └── UnloggableError (a ValueError)       a value that cannot be logged
    ├── CheckpointError                          a checkpoint that cannot be written, read or applied
    │   ├── NoCheckpointError (a FileNotFoundError and a ValueError)  a path without a checkpoint
    │   ├── CheckpointNameError (a ValueError)   a word such as "best" without a checkpoint
    │   ├── IncompleteCheckpointError (a KeyError)  a checkpoint that lacks a requested entry
    │   └── CheckpointMismatchError (a RuntimeError)  weights that do not fit the model
    └── PeerError                                the end of this rank, because another rank has failed
    SIGTERMException (a SystemExit)              the end of a run, because of a SIGTERM

A message states the cause, the value and the cure, in this order. The cure is a sentence about what to write.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar

from drivetrain.base.supplied import instead_of

P = ParamSpec("P")
R = TypeVar("R")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MODULE = re.compile(r"<(?:[\w<>]+\.)+(?=\w+ object>)")
_LONGEST_REPR = 100  # in characters; without a limit, the text of a model could fill pages


class DrivetrainError(Exception):
    """Base class: ``except DrivetrainError`` catches every error that drivetrain raises."""


class ConfigurationError(DrivetrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An argument does not exist. The error is also a TypeError, which Python raises for an unknown argument."""


class UnknownNameError(ConfigurationError, KeyError):
    """No object is registered under a name, or a dictionary lacks a key.

    The error is also a KeyError, which a failed lookup raises.
    """

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class WrongTypeError(ConfigurationError, TypeError):
    """An argument has a wrong type, or the model is missing.

    The error is also a TypeError, which Python raises for a wrong type.
    """


class SignatureError(ConfigurationError, TypeError, RuntimeError):
    """A step or a hook does not accept the loop's arguments.

    The error is also a TypeError, which Python raises for a wrong call. The error is also a RuntimeError, because only
    the run shows whether a step needs ``dataloader_idx``.
    """


class MissingAttributeError(ConfigurationError, AttributeError):
    """An object lacks a required attribute.

    The error is also an AttributeError, which Python raises for a missing attribute.
    """


class MissingPackageError(ConfigurationError, ModuleNotFoundError):
    """An optional package is not installed.

    The error is also a ModuleNotFoundError, which importing the package raises.
    """


class HookError(ConfigurationError, NotImplementedError):
    """A class defines a hook that no longer exists, or lacks a required hook.

    The error is also a NotImplementedError.
    """


class RunError(ConfigurationError, RuntimeError):
    """Parts of a run do not fit each other, or do not fit the machine.

    The error is also a RuntimeError, because it is detected during a run.
    """


class NotLoggedError(RunError):
    """A callback or a scheduler monitors a name that was not logged."""


class NotSupportedError(ConfigurationError):
    """The argument is valid in Lightning, but this version does not implement it."""


class LoggingError(DrivetrainError):
    """``self.log`` was called with a value or options that are not allowed in the calling hook."""


class LogNameError(LoggingError, TypeError):
    """``self.log`` got a name that is reserved or not a string.

    The error is also a TypeError, which Python raises for a wrong type.
    """


class UnloggableError(LoggingError, ValueError):
    """``self.log`` got a value that is not a number.

    The error is also a ValueError, which Python raises for a wrong value.
    """


class SIGTERMException(SystemExit):
    """The run ends because of a SIGTERM. If no code catches this exception, the process's exit code is 143."""

    def __init__(self, code: int = 128 + 15) -> None:
        super().__init__(code)


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written, read or applied."""


class NoCheckpointError(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at the path.

    The error is also a FileNotFoundError, which Python raises for a missing file, and a ValueError, because the
    argument is wrong.
    """


class CheckpointNameError(CheckpointError, ValueError):
    """There is no checkpoint for a word such as "best", or a folder is not a checkpoint.

    The error is also a ValueError, because the argument is wrong.
    """


class IncompleteCheckpointError(CheckpointError, KeyError, ValueError):
    """A checkpoint lacks a requested entry.

    The error is also a KeyError, which a failed lookup raises, and a ValueError.
    """

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """The weights of a checkpoint do not fit the model.

    The error is also a RuntimeError, which torch raises for weights that do not fit.
    """


class PeerError(DrivetrainError):
    """Another rank of the job has failed, so this rank ends, too.

    The message names the failed rank, and the place and cause of the failure.
    """


_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name that is most similar to ``word``, regardless of case; ``None`` if no name is
    similar.
    """
    names = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    # names with the same letters are preferred: "dpp" means "ddp"
    mistyped = (each for each in found if len(each) == len(word) and set(each) == set(word.lower()))
    return names[next(mistyped, found[0])] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, then all known names."""
    names = sorted(known)
    close = closest(word, names)
    hint = "" if close is None else f"Did you mean {close!r}? "
    return f"{hint}Known: {', '.join(names) or 'none'}."


def number_of(number: object, what: str) -> str:
    """Return a text such as "1 batch" or "2 batches", for the noun ``what`` in the singular."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith(('tch', 'ss')) else 's'}"


def first_of(names: Iterable[str], most: int) -> str:
    """Return a text such as "a, b and 3 more", with at most ``most`` names."""
    texts = list(names)
    left = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left} more" if left > 0 else "")


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message: in one line, without memory addresses, and shortened if the text is long.

    Names of modules are left out: ``<package.file.Timer object at 0x7f00>`` becomes ``<Timer object>``.
    """
    text = _MODULE.sub("<", _ADDRESS.sub("", " ".join(repr(value).split())))
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def described(value: Any) -> str:
    """Return a description of a value with a wrong type: "a str: 'x'", "None", "the class EarlyStopping itself".

    If the value's class is from Lightning, the description names the package, because drivetrain may have a class of
    that name.
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself{_in_parentheses(whose(value))}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}: {shown(value)}{_in_parentheses(whose(value))}"


def _in_parentheses(sentences: str) -> str:
    """Return ``sentences`` in parentheses, for use inside another sentence."""
    return f" ({sentences[0].lower()}{sentences[1:-1]})" if sentences else ""


def whose(value: Any) -> str:
    """Return a hint if ``value`` or its class is a class of Lightning, or a subclass of one; otherwise ""."""
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if (package := cls.__module__.partition(".")[0]) in _LIGHTNING:
            return (
                f"Its {cls.__name__} is that of the package {package}: import it from drivetrain, or run the program "
                "unchanged with `drivetrain exec`."
            )
    return ""


def wrong_value(
    owner: str, name: str, value: Any, expected: str, cure: str, types: tuple[type, ...] = (object,)
) -> ConfigurationError:
    """Return the error for a wrong value of an argument of ``owner``. The message names the accepted values, and what
    to write.

    If the value is not an instance of ``types``, the error is a :class:`WrongTypeError`.
    """
    kind = ConfigurationError if isinstance(value, types) else WrongTypeError
    return kind(f"{owner}({name}={shown(value)}): {name} is {expected}. Write {cure}.")


def unknown_value(owner: str, name: str, value: Any, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown argument of ``owner``. The message suggests one of the ``known`` names."""
    return ConfigurationError(f"{owner}({name}={shown(value)}) is unknown. {did_you_mean(str(value), known)}")


def check_installed(owner: str, package: str, instead: str = "", install: str = "") -> None:
    """Check that the package that ``owner`` needs is installed.

    Args:
        owner: the class or function that needs the package.
        package: the name under which the package is imported.
        instead: what to use without the package; "" if there is no replacement.
        install: the package's name for pip; "": ``package``.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        cure = f"Run `pip install {install or package}`" + (f", or use {instead}" if instead else "")
        raise MissingPackageError(f"{owner} needs the package {package}, which is not installed. {cure}. [DT1048]")


def check_known(owner: str, value: Any, what: str, known: Collection[str]) -> None:
    """Check that the first argument of ``owner`` is one of the ``known`` names. ``what`` is the noun for the names in
    the message.

    Raises:
        ConfigurationError: the value is not one of the names. The message suggests a similar name.
    """
    if value not in known:
        raise ConfigurationError(f"{owner}({value!r}): there is no such {what}. {did_you_mean(str(value), known)}")


def is_count(value: Any, lowest: int = 0) -> bool:
    """Return whether ``value`` is an int of at least ``lowest``. Booleans do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def count_meant(value: Any, otherwise: int, lowest: int = 0) -> int:
    """Return the int that ``value`` probably means, such as 3 for 3.0 or "3"; ``otherwise`` if there is no such int."""
    try:
        whole = None if isinstance(value, bool) or float(value) != int(float(value)) else int(float(value))
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return otherwise if whole is None or whole < lowest else whole


def check_count(owner: str, name: str, value: Any, lowest: int = 0, otherwise: int = 1, optional: bool = False) -> None:
    """Check that an argument of ``owner`` is an int of at least ``lowest``.

    Args:
        owner, name, value: as in :func:`wrong_value`.
        lowest: the smallest valid value.
        otherwise: the number that the message suggests, if the value does not seem to mean an int.
        optional: whether ``None`` is also valid.

    Raises:
        ConfigurationError: the value is smaller than ``lowest``.
        WrongTypeError: the value is not an int.
    """
    if not is_count(value, lowest) and not (optional and value is None):
        cure, tail = f"{name}={count_meant(value, otherwise, lowest)}", " or None" if optional else ""
        raise wrong_value(owner, name, value, f"an int of at least {lowest}{tail}", cure, (numbers.Integral,))


def check_choice(owner: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that an argument of ``owner`` is one of ``choices``.

    Raises:
        ConfigurationError: the value is not one of ``choices``.
    """
    if value not in choices:
        *others, last = (f'"{each}"' if isinstance(each, str) else repr(each) for each in choices)
        raise wrong_value(owner, name, value, f"{', '.join(others)} or {last}", "one of these")


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real number of Python or numpy. NaN and booleans do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def unknown_argument(owner: str, unknown: Mapping[str, Any], known: Iterable[str]) -> UnknownArgumentError:
    """Return the error for arguments that ``owner`` does not have. The message names the first unknown argument, and a
    similar name.
    """
    name = next(iter(unknown))
    cure = instead_of("a call", f"{owner}.{name}") or did_you_mean(name, known)
    return UnknownArgumentError(f"{owner} has no argument {name}={shown(unknown[name])}. {cure}")


class NoMore(TypedDict):
    """With ``**unknown: Unpack[NoMore]`` in a signature, type checkers accept no further keyword."""


def accepts_no_more(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for a function that collects unknown keywords in ``**unknown``, so that it can raise a helpful error.

    The decorator hides ``**unknown`` from the function's signature. Unlike :func:`arguments_checked`, this decorator
    adds no frame to a traceback.
    """
    signature = inspect.signature(fn)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fn.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    fn.__annotations__.pop("unknown", None)
    return fn


def arguments_checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for public functions: a call with an unknown argument raises an error that suggests a similar argument.

    Raises:
        UnknownArgumentError: there is no such argument.
        WrongTypeError: an argument without a default is missing.
    """
    signature = inspect.signature(fn)
    parameters = list(signature.parameters)[1:]
    positional = [each for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    required = [each.name for each in positional if each.default is each.empty]
    name = fn.__qualname__.removesuffix(".__init__")

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for key, value in kwargs.items():
            if key not in parameters:
                raise unknown_argument(name, {key: value}, parameters)
        if missing := [each for each in required[len(args) - 1 :] if each not in kwargs]:
            raise WrongTypeError(f"{name} needs {missing[0]}=. Write {name}({missing[0]}=...).")
        return fn(*args, **kwargs)

    return checked


def text_of(error: BaseException) -> str:
    """Return the text of ``error``; "" if the error's ``__str__`` raises, because a second exception would hide
    ``error``.
    """
    try:
        return str(error)
    except Exception:
        return ""
