"""The exceptions that drivetrain raises, and functions that build their messages.

::

    DrivetrainError
    ├── ConfigurationError (also a ValueError)   a wrong argument, or arguments that contradict each other
    │   ├── UnknownArgumentError (a TypeError)   an argument that does not exist
    │   ├── UnknownNameError (a KeyError)        nothing is registered under this name, or a dictionary lacks a key
    │   ├── WrongTypeError (a TypeError)         an argument of a type that is not accepted, or a missing model
    │   ├── SignatureError (a TypeError and a RuntimeError)  a method that does not take what the loop passes
    │   ├── MissingAttributeError (an AttributeError)  an object lacks an attribute that is needed
    │   ├── MissingPackageError (a ModuleNotFoundError)  an optional package is not installed
    │   ├── HookError (a NotImplementedError)    a hook that no longer exists, or that a class must define
    │   ├── RunError (a RuntimeError)            parts of a run that do not fit each other or the machine
    │   │   └── NotLoggedError                   a callback or a scheduler watches a name that was not logged
    │   └── NotSupportedError                    a valid argument that this version does not support yet
    ├── LaunchError (launchers.launcher)         a process of the job failed
    ├── LoggingError                             self.log called wrongly
    │   ├── LogNameError (a TypeError)           a name that is no text, or a reserved one
    │   └── UnloggableError (a ValueError)       a value that cannot be logged
    ├── CheckpointError                          a checkpoint that cannot be written, read or applied
    │   ├── NoCheckpointError (a FileNotFoundError and a ValueError)  there is none at the path
    │   ├── CheckpointNameError (a ValueError)   ckpt_path="best" or the like names none
    │   ├── IncompleteCheckpointError (a KeyError)  it lacks what was asked for
    │   └── CheckpointMismatchError (a RuntimeError)  its weights do not fit the model
    └── PeerError                                another rank of the job failed, so this one ends too
    SIGTERMException (a SystemExit)              the run ends because it was sent SIGTERM

A message states the cause, the value and the cure, in this order: its last sentence says what to write instead.
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
_LONGEST_REPR = 100  # characters; without a limit, the text of a model would fill pages


class DrivetrainError(Exception):
    """Base class: ``except DrivetrainError`` catches every error that drivetrain itself detects."""


class ConfigurationError(DrivetrainError, ValueError):
    """An argument is wrong, or two arguments contradict each other. Raised before anything is built."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An argument does not exist. The error is also a TypeError, which Python raises for an unknown argument."""


class UnknownNameError(ConfigurationError, KeyError):
    """Nothing is registered under this name, or a dictionary lacks a key. The error is also a KeyError, which a failed
    lookup raises.
    """

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class WrongTypeError(ConfigurationError, TypeError):
    """An argument has a wrong type, or the model is missing. The error is also a TypeError, which Python raises for a
    wrong type.
    """


class SignatureError(ConfigurationError, TypeError, RuntimeError):
    """A step or a hook does not accept the loop's arguments. The error is also a TypeError, which Python raises for a
    wrong call, and a RuntimeError, because whether a step needs ``dataloader_idx`` is known only during the run.
    """


class MissingAttributeError(ConfigurationError, AttributeError):
    """An object lacks a required attribute. The error is also an AttributeError, which Python raises for a missing
    attribute.
    """


class MissingPackageError(ConfigurationError, ModuleNotFoundError):
    """An optional package is not installed. The error is also a ModuleNotFoundError, which importing the package
    raises.
    """


class HookError(ConfigurationError, NotImplementedError):
    """A hook no longer exists, or a class must define it. The error is also a NotImplementedError."""


class RunError(ConfigurationError, RuntimeError):
    """Parts of a run do not fit each other or the machine. The error is also a RuntimeError, because it is only
    detected during a run.
    """


class NotLoggedError(RunError):
    """A callback or a scheduler monitors a name that was not logged."""


class NotSupportedError(ConfigurationError):
    """The argument is valid in Lightning, but this version does not implement it."""


class LoggingError(DrivetrainError):
    """``self.log`` was called in a hook, with a value or options that are not allowed there."""


class LogNameError(LoggingError, TypeError):
    """``self.log`` got a name that is not a string, or a reserved one. The error is also a TypeError, which Python
    raises for a wrong type.
    """


class UnloggableError(LoggingError, ValueError):
    """``self.log`` got a value that is not a number. The error is also a ValueError, which Python raises for a wrong
    value.
    """


class SIGTERMException(SystemExit):
    """The run ends because its process was sent SIGTERM; if no code catches this exception, the exit code is 143."""

    def __init__(self, code: int = 128 + 15) -> None:
        super().__init__(code)


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written, read or applied."""


class NoCheckpointError(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at the path. The error is also a FileNotFoundError, which Python raises for a missing
    file, and a ValueError, because the argument is wrong.
    """


class CheckpointNameError(CheckpointError, ValueError):
    """A word such as "best" stands for no checkpoint, or a folder is not a checkpoint. The error is also a ValueError,
    because the argument is wrong.
    """


class IncompleteCheckpointError(CheckpointError, KeyError, ValueError):
    """A checkpoint lacks a requested entry. The error is also a KeyError, which a failed lookup raises, and a
    ValueError.
    """

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """The weights of a checkpoint do not fit the model. The error is also a RuntimeError, which torch raises for
    weights that do not fit.
    """


class PeerError(DrivetrainError):
    """Another rank of the job has failed, so this rank ends, too. The message says which rank, where and why."""


_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name most similar to ``word``, ignoring case; ``None`` if none is similar."""
    names = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    # a name with the same letters is preferred: "dpp" probably means "ddp"
    mistyped = (each for each in found if len(each) == len(word) and set(each) == set(word.lower()))
    return names[next(mistyped, found[0])] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, then all known names."""
    names = sorted(known)
    close = closest(word, names)
    hint = "" if close is None else f"Did you mean {close!r}? "
    return f"{hint}Known: {', '.join(names) or 'none'}."


def number_of(number: object, what: str) -> str:
    """Return the number and the noun ``what``, which is in the plural unless the number is 1: "1 batch", "2
    batches".
    """
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith(('tch', 'ss')) else 's'}"


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message: in one line, without memory addresses, and shortened if it is long.

    A name loses its module: ``<package.file.Timer object at 0x7f00>`` becomes ``<Timer object>``.
    """
    text = _MODULE.sub("<", _ADDRESS.sub("", " ".join(repr(value).split())))
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def described(value: Any) -> str:
    """Describe a value of the wrong type: "a str: 'x'", "None", "the class EarlyStopping itself".

    If the value's class is Lightning's, the text names its package, because the class may have the same name here.
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself{_in_parentheses(whose(value))}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}: {shown(value)}{_in_parentheses(whose(value))}"


def _in_parentheses(sentences: str) -> str:
    """Return ``sentences`` in parentheses, to be inserted into another sentence."""
    return f" ({sentences[0].lower()}{sentences[1:-1]})" if sentences else ""


def whose(value: Any) -> str:
    """Return which class of Lightning ``value`` has or extends, and what to do; "" if there is no such class."""
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
    """Return the error for a wrong value of an argument of ``owner``; the message says what is accepted, and what to
    write.

    If the value has none of ``types``, the error is a :class:`WrongTypeError`.
    """
    kind = ConfigurationError if isinstance(value, types) else WrongTypeError
    return kind(f"{owner}({name}={shown(value)}): {name} is {expected}. Write {cure}.")


def unknown_value(owner: str, name: str, value: Any, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an argument of ``owner`` that is none of the ``known`` names; the message suggests one of
    them.
    """
    return ConfigurationError(f"{owner}({name}={shown(value)}) is unknown. {did_you_mean(str(value), known)}")


def check_installed(owner: str, package: str, instead: str = "", install: str = "") -> None:
    """Check that ``owner`` can import its package.

    Args:
        owner: the class or function that needs the package.
        package: the name under which the package is imported.
        instead: what to use without the package; "" if nothing else does the same.
        install: the name under which pip installs the package; "": the same name.

    Raises:
        MissingPackageError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        cure = f"Run `pip install {install or package}`" + (f", or use {instead}" if instead else "")
        raise MissingPackageError(f"{owner} needs the package {package}, which is not installed. {cure}. [DT1048]")


def check_known(owner: str, value: Any, what: str, known: Collection[str]) -> None:
    """Check that the first argument of ``owner`` is one of the ``known`` names; ``what`` is the noun for such a name.

    Raises:
        ConfigurationError: the value is none of them; the message suggests a similar one.
    """
    if value not in known:
        raise ConfigurationError(f"{owner}({value!r}): there is no such {what}. {did_you_mean(str(value), known)}")


def is_count(value: Any, lowest: int = 0) -> bool:
    """Return whether ``value`` is an int of at least ``lowest``; booleans do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def count_meant(value: Any, otherwise: int, lowest: int = 0) -> int:
    """Return the int that ``value`` probably means, such as 3 for 3.0 or "3"; if it means none, return
    ``otherwise``.
    """
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
        otherwise: the number that the message suggests, unless the value probably means another int.
        optional: whether ``None`` is accepted, too.

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
        ConfigurationError: the value is none of them.
    """
    if value not in choices:
        *others, last = (f'"{each}"' if isinstance(each, str) else repr(each) for each in choices)
        raise wrong_value(owner, name, value, f"{', '.join(others)} or {last}", "one of these")


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real number of Python or numpy, except NaN; booleans do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def unknown_argument(owner: str, unknown: Mapping[str, Any], known: Iterable[str]) -> UnknownArgumentError:
    """Return the error for arguments that ``owner`` does not have; the message has the first of them, and a similar
    name.
    """
    name = next(iter(unknown))
    cure = instead_of("a call", f"{owner}.{name}") or did_you_mean(name, known)
    return UnknownArgumentError(f"{owner} has no argument {name}={shown(unknown[name])}. {cure}")


class NoMore(TypedDict):
    """With ``**unknown: Unpack[NoMore]`` in a signature, type checkers accept no further keyword."""


def accepts_no_more(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for a function that catches misspelt keywords in ``**unknown``, to raise its own error.

    The decorator hides ``**unknown`` from the function's signature. Unlike :func:`arguments_checked`, it adds no frame
    to a traceback.
    """
    signature = inspect.signature(fn)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fn.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    fn.__annotations__.pop("unknown", None)
    return fn


def arguments_checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for entry points: an unknown argument of ``fn`` raises an error that suggests a similar argument.

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
    """Return the text of ``error``; "" if its ``__str__`` raises, so that this exception does not hide ``error``."""
    try:
        return str(error)
    except Exception:
        return ""
