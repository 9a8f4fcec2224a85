"""Lightning's ``utilities.parsing`` and ``utilities.model_helpers``: inspect a class's methods and its constructor's
arguments.
"""

from __future__ import annotations

import inspect
import pickle
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import nn

from drivetrain.base.introspect import overrides
from drivetrain.base.packages import torchvision
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.errors import check_installed
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.hparams import HyperparametersMixin
from drivetrain.module.module import LightningModule
from drivetrain.tuner.tuned_attribute import holders, set_tuned

_CONTRACTS = (LightningModule, LightningDataModule, Callback)


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return whether ``instance`` overrides a method of its base class, such as LightningModule.

    Args:
        method_name: the method's name. The result is False if the base class has no such method.
        instance: a module, a data module or a callback; or any object if ``parent`` is given. For ``None``, the result
            is False.
        parent: the base class; ``None``: LightningModule, LightningDataModule or Callback.

    Raises:
        ValueError: ``instance`` is neither a module, a data module nor a callback, and no ``parent`` is given.
    """
    if instance is None:
        return False
    contract = parent or next((cls for cls in _CONTRACTS if isinstance(instance, cls)), None)
    if contract is None:
        raise ValueError(f"{type(instance).__name__} is no module, data module or callback. Pass parent=.")
    return hasattr(contract, method_name) and overrides(instance, method_name, contract)


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether ``hook_fx`` accepts ``param``.

    Args:
        hook_fx: a method, bound or not. The method's first parameter does not count.
        param: the argument's name.
        explicit: if False, a method with ``*args`` accepts any ``param``.
        min_args: if given, a method with at least this many parameters accepts any ``param``.
    """
    (_, *names), rest, *_ = inspect.getfullargspec(hook_fx)
    return param in names or (not explicit and rest is not None) or (min_args is not None and len(names) >= min_args)


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Return torchvision's model called ``model_name``; ``kwargs`` are its arguments.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    check_installed("get_torchvision_model", "torchvision")

    return torchvision.models.get_model(model_name, **kwargs)


def get_init_args(frame: types.FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` that ``frame`` runs, by name, including the items of ``**kwargs``.

    Return an empty dictionary for any other function, and for an ``__init__`` that uses neither ``super()`` nor
    ``__class__``, because its class is unknown.
    """
    code, values = frame.f_code, frame.f_locals
    if "__class__" not in values or code.co_name != "__init__":
        return {}
    names, _, keywords = inspect.getargs(code)
    found = {name: values[name] for name in names[1:] if name in values}
    return {**found, **(values.get(keywords, {}) if keywords else {})}


def collect_init_args(
    frame: types.FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """Collect the arguments of the constructors that ``frame`` and its callers run.

    Args:
        frame: the frame of a constructor, or of a function that it calls.
        path_args: the list that is returned. Gets a dictionary for each constructor; the last one is of the most
            derived class.
        inside: whether to stop at the first frame that is no constructor, even before a constructor was found.
        classes: the classes whose constructors count; empty: all classes.
    """
    caller = frame.f_back
    while caller is not None:
        names = inspect.getargs(frame.f_code).args if frame.f_code.co_name == "__init__" else []
        this = frame.f_locals.get(names[0]) if names else None
        if "__class__" in frame.f_locals and (not classes or isinstance(this, classes)):
            path_args.append(get_init_args(frame))
            inside = True
        elif inside:
            break
        frame, caller = caller, caller.f_back
    return path_args


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of ``self``, ``*args`` and ``**kwargs`` in the ``__init__`` of ``cls``. Each missing name is
    ``None``.
    """
    names, args, kwargs = inspect.getargs(inspect.unwrap(cls.__init__).__code__)  # type: ignore[misc]
    return names[0], args, kwargs


def save_hyperparameters(
    obj: HyperparametersMixin,
    *args: Any,
    ignore: Any = None,
    frame: types.FrameType | None = None,
    given_hparams: Mapping[str, Any] | None = None,
) -> None:
    """Call ``obj.save_hyperparameters``."""
    frame = frame or inspect.currentframe()
    HyperparametersMixin.save_hyperparameters(obj, *args, ignore=ignore, frame=frame, given_hparams=given_hparams)


def is_picklable(obj: object) -> bool:
    """Return whether ``pickle`` accepts ``obj``."""
    try:
        pickle.dumps(obj)
    except Exception:  # a user's __reduce__ can raise any exception
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Remove the values that ``pickle`` refuses, and warn about each."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(f"The hyperparameter {name!r} was removed: a {type(hparams[name]).__name__} cannot be pickled.")
        del hparams[name]


# ---- an attribute of a module, its hyperparameters or its data module ------------------------------------------------


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return whether the module, its ``hparams`` or its data module's ``hparams`` has ``attribute``."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return ``attribute`` of the data module's ``hparams``, the module's ``hparams``, or the module: the first that
    has it.

    Raises:
        AttributeError: none of the objects has the attribute.
    """
    holder = _found(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, Mapping) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set ``attribute`` on the module, in its ``hparams`` and in its data module's ``hparams``, wherever it already
    exists.

    Raises:
        AttributeError: none of the objects has the attribute.
    """
    _found(model, attribute)
    set_tuned(vars(model).get("_trainer"), model, attribute, value)


def _found(model: Any, attribute: str) -> list[Any]:
    if not (found := _holders(model, attribute)):
        raise AttributeError(
            f"Neither {type(model).__name__}, nor its hparams, nor its data module has {attribute!r}. Set it in one."
        )
    return found


def _holders(model: Any, attribute: str) -> list[Any]:
    return list(holders(vars(model).get("_trainer"), model, attribute))
