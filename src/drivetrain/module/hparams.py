"""Hyperparameters of a module or a data module: collected where they are given, kept for checkpoints and loggers."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError, UnknownNameError, did_you_mean

# What the __init__ that @dataclass writes finds in an argument whose default a factory is still to make.
_FACTORY_DEFAULT: Any = getattr(dataclasses, "_HAS_DEFAULT_FACTORY", object())


_described: ContextVar[tuple[type, dict[str, Any]] | None] = ContextVar("described hyperparameters", default=None)
"""The class that LightningCLI is building an object of, and its arguments as the configuration describes them."""


class _MissingHyperparameter(AttributeError, KeyError):
    """What is to be deleted is neither an attribute nor a key."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


def _no_hyperparameter(known: Mapping[Any, Any], name: str) -> str:
    names = [key for key in known if isinstance(key, str)]
    return f"There is no hyperparameter {name!r}. {did_you_mean(name, names)}"


class AttributeDict(dict[str, Any]):
    """A dictionary whose keys are attributes too: ``d.lr`` is ``d["lr"]``.

    A key with the name of a method of ``dict``, such as "items", is available in brackets only. A copy by
    ``copy.deepcopy`` shares the values that cannot be copied.

    Raises:
        AttributeError: there is no such key; the message suggests the likeliest one.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):  # copy, pickle and inspect ask for many of these
            raise AttributeError(name)
        raise AttributeError(_no_hyperparameter(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise _MissingHyperparameter(_no_hyperparameter(self, name))
        del self[name]

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(key for key in self if isinstance(key, str))]

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeDict:
        copied = type(self)()
        memo[id(self)] = copied
        for key, value in self.items():
            copied[key] = _copied(value, memo)
        return copied


class HyperparametersMixin:
    """Gives a module or a data module :meth:`save_hyperparameters` and what it keeps.

    Nothing here needs ``nn.Module.__init__`` to have run: everything lies in the instance's ``__dict__``, so that it
    is pickled and copied with the object.
    """

    _hparams_name: str | None = None
    """The argument of ``__init__`` that was saved as a whole; "kwargs" if they were saved one by one."""

    _log_hyperparams: bool = False
    """Whether the loggers get the hyperparameters."""

    _hparams: AttributeDict
    _hparams_initial: AttributeDict

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
        given_hparams: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the arguments of ``__init__``, for checkpoints, for loggers and in :attr:`hparams`.

        Call it in ``__init__``, before or after ``super().__init__()``, or in the ``__post_init__`` of a dataclass.
        The values are those that the arguments have when it is called. Called in the ``__init__`` of a base class it
        sees the arguments of the derived classes too, and theirs win. Further calls add to what is kept.

        In an object that LightningCLI builds, the values are those of the configuration: an object among the arguments
        is described by its ``class_path`` and ``init_args``.

        Args:
            *args: nothing: every argument, ``**kwargs`` one by one, ``*args`` not at all. Names: only those. One
                mapping, namespace or dataclass: its items, as the hyperparameters; names beside it have no effect.
            ignore: names to leave out, and to forget if a base class has saved them.
            frame: where to look for ``__init__``, outwards; ``None``: from the caller on.
            logger: whether the Trainer passes them to the loggers.
            given_hparams: the arguments, if they are known already; then no frame is inspected.

        Raises:
            ConfigurationError: an unknown name, an object of another type, more than one object, or a call outside of
                ``__init__`` without an object.
        """
        objects = [arg for arg in args if not isinstance(arg, str)]
        configured = _described.get()
        if given_hparams is None and configured is not None and type(self) is configured[0] and not objects:
            given_hparams = configured[1]
        if given_hparams is not None:
            arguments: dict[str, Any] | None = dict(given_hparams)
        else:
            arguments = _init_arguments(self, frame or inspect.currentframe())
        name = "kwargs"
        if objects:
            saved = _items(*objects)
            if len(objects) < len(args):
                names = ", ".join(repr(arg) for arg in args if isinstance(arg, str))
                rank_zero_warn(
                    f"{type(self).__name__} called save_hyperparameters with an object and with names, {names}. The "
                    "items of the object are saved, and names have no effect beside it. Leave them out."
                )
            # An object that came as an argument goes back as one when the class is built from a checkpoint; where a
            # derived class passed it on, under the name it has there.
            passed = [key for key, value in (arguments or {}).items() if value is objects[0]]
            name = passed[-1] if passed else name
        else:
            saved = _chosen(type(self).__name__, arguments, args)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        saved = {key: value for key, value in saved.items() if key not in ignored}
        for key, value in saved.items():
            if isinstance(value, nn.Module) and not parity.current().pickle:
                rank_zero_warn(
                    f"The hyperparameter {key!r} is an nn.Module. A checkpoint has its weights in the state_dict and "
                    "would hold them twice, so it is left out of the hyperparameters there. "
                    f"Write self.save_hyperparameters(ignore=[{key!r}])."
                )
        own = self.__dict__
        if objects and is_config(objects[0]) and not own.get("_hparams"):
            own["_hparams"] = copy.deepcopy(objects[0]) if ignored else objects[0]
        else:
            self.hparams.update(saved)
        initial = own.setdefault("_hparams_initial", AttributeDict())
        initial.update(_snapshot(saved))
        self.remove_ignored_hparams(list(ignored))  # a base class may have saved them
        own["_hparams_name"] = name
        own["_log_hyperparams"] = logger

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Forget the hyperparameters of these names."""
        for key in ignore_list:
            self.hparams.pop(key, None)
            self.__dict__.get("_hparams_initial", {}).pop(key, None)

    @property
    def hparams(self) -> Any:
        """The hyperparameters, an :class:`AttributeDict`; change them as you like (``self.hparams.lr = 1``).

        After ``save_hyperparameters(config)`` with a DictConfig of OmegaConf, they are that config.
        """
        found: Any = self.__dict__.get("_hparams")
        if found is None:  # not setdefault, which torch.compile of torch 2.9 cannot trace
            found = self.__dict__["_hparams"] = AttributeDict()
        return found

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were saved; modules among them are not copied."""
        return _snapshot(self.__dict__.get("_hparams_initial", {}))


def is_config(value: Any) -> bool:
    """Return whether ``value`` is a configuration of OmegaConf."""
    return "omegaconf" in sys.modules and bool(load("drivetrain.base.configs:is_config")(value))


@contextmanager
def described_hyperparameters(cls: type, values: dict[str, Any]) -> Iterator[None]:
    """Context in which an object of ``cls`` that is built saves ``values`` as its hyperparameters."""
    token = _described.set((cls, values))
    try:
        yield
    finally:
        _described.reset(token)


# ---- where the values come from --------------------------------------------------------------------------------------


def _init_arguments(obj: Any, frame: types.FrameType | None) -> dict[str, Any] | None:
    """The arguments of every ``__init__`` of ``obj`` that is running, derived classes last; ``None`` if none is."""
    found: dict[str, Any] | None = None
    for code, values in _init_frames(obj, frame):
        names, _, keywords = inspect.getargs(code)
        found = found or {}
        for name in names[1:]:
            if name in values:  # and was not deleted
                found[name] = vars(obj)[name] if values[name] is _FACTORY_DEFAULT else values[name]
        found.update(values.get(keywords, {}) if keywords else {})
    return found


def _init_frames(obj: Any, frame: types.FrameType | None) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Every running ``__init__`` of ``obj``, from ``frame`` outwards; decorators and helpers may stand between."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is obj:
            yield code, frame.f_locals
        frame = frame.f_back


def _chosen(cls: str, arguments: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments called ``names``, or all."""
    if arguments is None:
        raise UnknownNameError(
            f"{cls} called save_hyperparameters({', '.join(map(repr, names))}) outside of __init__, where there are no "
            "arguments to keep. Call it in __init__, or pass a dictionary: self.save_hyperparameters({...})."
        )
    for name in names:
        if name not in arguments:
            raise UnknownNameError(
                f"{cls}.__init__ has no argument {name!r} to save as a hyperparameter. {did_you_mean(name, arguments)}"
            )
    return {name: arguments[name] for name in names} if names else arguments


def _items(*args: Any) -> dict[str, Any]:
    """Return the items of the one object in ``args``."""
    obj = args[0]
    if len(args) == 1:
        if is_config(obj) and isinstance(obj, Mapping):
            return dict(load("drivetrain.base.configs:as_plain")(obj))
        if isinstance(obj, Mapping):
            return dict(obj)
        if isinstance(obj, (argparse.Namespace, types.SimpleNamespace)):
            return dict(vars(obj))
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    raise ConfigurationError(
        f"save_hyperparameters got {', '.join(type(arg).__name__ for arg in args)}. "
        'Pass names of arguments, as in save_hyperparameters("lr", "hidden"), or one mapping, namespace or dataclass.'
    )


# ---- copies ----------------------------------------------------------------------------------------------------------


def _snapshot(values: Mapping[str, Any]) -> AttributeDict:
    """Return a deep copy, except for modules: a second set of weights would be a high price for a record."""
    memo: dict[int, Any] = {}
    return AttributeDict(
        {key: value if isinstance(value, nn.Module) else _copied(value, memo) for key, value in values.items()}
    )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of ``value``, or ``value`` itself if it cannot be copied: a lock, a file, a tensor with a graph."""
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever copying a user's object raises
        for key in set(memo) - known:  # halves of copies, which another value might be given
            del memo[key]
        return value
