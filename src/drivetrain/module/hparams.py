"""The hyperparameters of a module or a data module, collected from constructor arguments for checkpoints and
loggers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from drivetrain import parity
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError, UnknownNameError, did_you_mean

with on_first_use:
    from drivetrain.base import configs

# For a field with a default factory, the ``__init__`` of a dataclass has this default value.
_FACTORY_DEFAULT: Any = getattr(dataclasses, "_HAS_DEFAULT_FACTORY", object())


_described: ContextVar[tuple[type, dict[str, Any]] | None] = ContextVar("described hyperparameters", default=None)
"""The class of the object that LightningCLI is constructing, and the arguments from LightningCLI's configuration."""


class _MissingHyperparameter(AttributeError, KeyError):
    """The error of ``del hparams.name`` and ``del hparams["name"]`` for a hyperparameter that does not exist."""

    __str__ = Exception.__str__  # str() of a KeyError has the message in quotes


def _no_hyperparameter(known: Mapping[Any, Any], name: str) -> str:
    names = [key for key in known if isinstance(key, str)]
    more = "" if names else " self.save_hyperparameters() in __init__ keeps its arguments."
    return f"There is no hyperparameter {name!r}. {did_you_mean(name, names)}{more}"


class AttributeDict(dict[str, Any]):
    """A dictionary whose keys are also attributes: ``d.lr`` is ``d["lr"]``.

    If a key is the name of a ``dict`` method, such as "items", only ``d["items"]`` works. A deep copy contains the
    original of a value that cannot be copied, for example a lock.

    Raises:
        AttributeError: the key does not exist. The message suggests the most similar key.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):  # copy and pickle look up names such as __deepcopy__
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
    """Gives a module or a data module :meth:`save_hyperparameters`, :attr:`hparams` and :attr:`hparams_initial`.

    All values are kept in the instance's ``__dict__``. The values can therefore be saved before ``nn.Module.__init__``
    has run. A pickle or copy of the instance contains the values.
    """

    _hparams_name: str | None = None
    """The name of the ``__init__`` argument whose items are the hyperparameters; "kwargs" if each hyperparameter is a
    separate argument.
    """

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
        """Save the arguments of ``__init__``, for checkpoints, for loggers and in :attr:`hparams`.

        Call this method in ``__init__``, before or after ``super().__init__()``, or in the ``__post_init__`` of a
        dataclass. The method saves the values that the arguments have at the time of the call. A call in the
        ``__init__`` of a base class also saves the arguments of the derived class's ``__init__``. If both classes have
        an argument of the same name, the derived class's value is saved. A second call keeps the values that the first
        call has saved, and adds further values.

        For an object that LightningCLI constructs, the saved values are those of the configuration. In the
        configuration, an argument that is an object is described by its ``class_path`` and ``init_args``.

        Args:
            *args: the names of the arguments to save. If there are no names, all arguments and all entries of
                ``**kwargs`` are saved, but not ``*args``. In place of names, pass one mapping, namespace or dataclass
                to save its items. Names beside such an object have no effect.
            ignore: names that are not saved. Values that a base class has already saved under these names are removed.
            frame: the stack frame in which the search for ``__init__`` begins; ``None``: the caller of this method. The
                search continues in the frame's callers.
            logger: whether the Trainer passes the hyperparameters to the loggers.
            given_hparams: the arguments, if the caller knows them. The method then inspects no frame.

        Raises:
            ConfigurationError: a name is unknown, an object is not a mapping, namespace or dataclass, there are several
                objects, or a call outside ``__init__`` has no object.
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
            # load_from_checkpoint passes the object to the constructor, as the argument ``name``. If a derived class
            # passes the object to its base class under another name, ``name`` must be the derived class's name.
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
        if objects and configs.is_config(objects[0]) and not own.get("_hparams"):
            own["_hparams"] = copy.deepcopy(objects[0]) if ignored else objects[0]
        else:
            self.hparams.update(saved)
        initial = own.setdefault("_hparams_initial", AttributeDict())
        initial.update(_snapshot(saved))
        self.remove_ignored_hparams(list(ignored))  # a base class may have saved ignored names
        own["_hparams_name"] = name
        own["_log_hyperparams"] = logger

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove the hyperparameters with these names."""
        for key in ignore_list:
            self.hparams.pop(key, None)
            self.__dict__.get("_hparams_initial", {}).pop(key, None)

    @property
    def hparams(self) -> Any:
        """The hyperparameters: an :class:`AttributeDict`, which can be changed (``self.hparams.lr = 1``).

        After ``save_hyperparameters(config)``, where ``config`` is an OmegaConf DictConfig, ``hparams`` is ``config``.
        """
        found: Any = self.__dict__.get("_hparams")
        if found is None:  # torch.compile of torch 2.9 cannot trace setdefault
            found = self.__dict__["_hparams"] = AttributeDict()
        return found

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters with the values that :meth:`save_hyperparameters` has saved. Hyperparameters
        that are modules are not copied.
        """
        return _snapshot(self.__dict__.get("_hparams_initial", {}))


@contextmanager
def described_hyperparameters(cls: type, values: dict[str, Any]) -> Iterator[None]:
    """Context in which a new object of ``cls`` saves ``values`` as its hyperparameters."""
    token = _described.set((cls, values))
    try:
        yield
    finally:
        _described.reset(token)


# ---- the source of the values ----------------------------------------------------------------------------------------


def _init_arguments(obj: Any, frame: types.FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of all running ``__init__`` calls of ``obj`` in one dictionary; ``None`` if there is no such
    call.

    If a derived class and its base class have an argument of the same name, the derived class's value is returned.
    """
    found: dict[str, Any] | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is obj:
            names, _, keywords = inspect.getargs(code)
            values, found = frame.f_locals, found or {}
            for name in names[1:]:
                if name in values:  # __init__ may delete its argument
                    found[name] = vars(obj)[name] if values[name] is _FACTORY_DEFAULT else values[name]
            found.update(values.get(keywords, {}) if keywords else {})
        frame = frame.f_back
    return found


def _chosen(cls: str, arguments: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments with these ``names``. Without names, return all arguments."""
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
    """Return the items of the single object in ``args``."""
    obj = args[0]
    if len(args) == 1:
        if configs.is_config(obj) and isinstance(obj, Mapping):
            return dict(configs.as_plain(obj))
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
    """Return a deep copy of ``values``. Modules are not copied, because a copy would duplicate their weights."""
    memo: dict[int, Any] = {}
    return AttributeDict(
        {key: value if isinstance(value, nn.Module) else _copied(value, memo) for key, value in values.items()}
    )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value``. Return ``value`` itself if it cannot be copied, such as a lock or an open
    file.
    """
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a user's __deepcopy__ may raise any exception
        for key in set(memo) - known:  # remove incomplete copies
            del memo[key]
        return value
