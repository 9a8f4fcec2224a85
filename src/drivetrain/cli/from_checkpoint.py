"""The hyperparameters in checkpoints of LightningCLI: plain data that describes the model's arguments.

An argument that is an object is described by ``class_path`` and ``init_args``. There are two more keys. ``_class_path``
is the model's class, if the command line named it. ``_instantiator`` marks hyperparameters that LightningCLI has
written. A checkpoint cannot choose which code runs: it may only name a class that the program has imported, and that
:mod:`drivetrain.checkpoints.references` allows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.base.introspect import taken
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import yaml
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.checkpoints.references import find_open, name_of
from drivetrain.errors import CheckpointError, described

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

with on_first_use:
    from drivetrain.cli import argument_parser
    from drivetrain.module import loading


CLASS_PATH, INSTANTIATOR = "_class_path", "_instantiator"

WRITTEN = "lightning.pytorch.cli.instantiate_module"
"""The value of ``_instantiator``. Lightning expects this value in a checkpoint."""

_KNOWN = frozenset({WRITTEN, "pytorch_lightning.cli.instantiate_module"})
_MODULES_OF_THE_PARSER = frozenset({"jsonargparse", "yaml", "docstring_parser", "typeshed_client", "importlib"})


def hyperparameters(
    parser: ArgumentParser, config: Namespace, key: str, cls: type, links: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the hyperparameters to save in checkpoints for a model or data module that LightningCLI creates.

    Args:
        parser: the parser of the subcommand.
        config: the parsed configuration.
        key: the option of the object, "model" or "data".
        cls: the object's class.
        links: the values of options that the parser computes from other objects (see ``link_arguments``).

    Returns: The hyperparameters. ``None`` if the configuration contains objects that YAML cannot represent, or names a
    class other than ``cls``.
    """
    try:
        values: dict[str, Any] = as_plain(parser, config).get(key) or {}
    except Exception:  # a user's object may raise any exception when it is converted to text
        return None
    path = values.get("class_path")
    if path is not None:
        if _found(path) is not cls:
            return None
        values = {CLASS_PATH: path, **(values.get("init_args") or {}), **(values.get("dict_kwargs") or {})}
    for option, value in links.items():
        owner, *names = option.split(".")
        if owner == key and names:
            if names[0] == "init_args":
                names = names[1:]
            holder = values
            for name in names[:-1]:
                holder = holder[name]
            holder[names[-1]] = value
    return {**values, INSTANTIATOR: WRITTEN}


def with_hyperparameters(parser: ArgumentParser, config: Namespace, path: str, any_class: bool) -> Namespace:
    """Return ``config`` with the hyperparameters of a checkpoint as the model's arguments. Log which arguments change.

    Args:
        parser: the parser of the subcommand.
        config: the parsed configuration.
        path: the checkpoint.
        any_class: whether the configuration names the model's class.

    Raises:
        CheckpointError: the hyperparameters name a class that a checkpoint may not name, or do not fit the model.
    """
    try:
        values = dict(loading.hyperparameters_in(path))
    except CheckpointError:  # the Trainer will read the file again, and raise the error
        return config
    values.pop(INSTANTIATOR, None)
    class_path = values.pop(CLASS_PATH, None)
    before = config.get("model")
    if not values or not before or (any_class and class_path is None and "class_path" not in before):
        return config
    if class_path is None:
        current = as_plain(parser, config).get("model") or {}
        current = current.get("init_args", current)
    else:
        check_names({"class_path": class_path})
        of_class = parser_of(_imported(class_path))
        current = as_plain(of_class, of_class.get_defaults()).get("module") or {}
    check_names({name: value for name, value in values.items() if _differs(value, current.get(name))})
    try:
        with _nothing_imported(), _raising(parser):
            if any_class:
                model = _of_class(class_path or before["class_path"], values, class_path is not None)
            else:
                model = {name: value for name, value in values.items() if name in before}
                _check_groups(options_below(parser, "model"), model)
            result: Namespace = parser.parse_object({"model": model}, config)
    except Exception as error:  # an error of the parser, caused by values from the file
        raise CheckpointError(
            f"The hyperparameters in {path} do not fit the model of this command line: {', '.join(map(str, values))}. "
            "With --ckpt_path the model is configured as they say. Pass a checkpoint of this model, or leave "
            f"--ckpt_path out and load the weights in the program. The parser's error:\n{error}"
        ) from error
    changed = [name for name, value in result["model"].items() if before.get(name) != value]
    if changed:
        names = dict.fromkeys(name.removeprefix("init_args.").partition(".")[0] for name in changed)
        rank_zero_info(
            f"The model is configured as in {path}; taken from there: {', '.join(names)}. To train its weights with "
            "other values, leave --ckpt_path out and load the checkpoint in the program."
        )
    return result


def class_and_arguments(cls: type, saved: dict[str, Any], given: Collection[str]) -> tuple[type, dict[str, Any]]:
    """Return the class that the hyperparameters ``saved`` name (see :func:`class_to_build`), and the arguments for this
    class (see :func:`rebuilt`).
    """
    found = class_to_build(cls, saved)
    return found, rebuilt(found, saved, given)


def class_to_build(cls: type, saved: dict[str, Any]) -> type:
    """Return the class that the hyperparameters name, by default ``cls``. Remove the keys ``_class_path`` and
    ``_instantiator`` from ``saved``.

    Args:
        cls: the class whose ``load_from_checkpoint`` was called.
        saved: the hyperparameters in a checkpoint.

    Raises:
        CheckpointError: the hyperparameters name a class that the program has not imported, or that is no subclass of
            ``cls``.
    """
    if (instantiator := saved.pop(INSTANTIATOR, None)) is None:
        return cls
    if instantiator not in _KNOWN:
        raise CheckpointError(
            f"The hyperparameters name {described(instantiator)} as what builds the module, and a checkpoint may not "
            f"choose that. Write the file again with {WRITTEN!r} as its {INSTANTIATOR!r}."
        )
    if (path := saved.pop(CLASS_PATH, None)) is None:
        return cls
    found = _imported(path)
    if not (isinstance(found, type) and issubclass(found, cls)):
        raise CheckpointError(
            f"The checkpoint is of the class {path!r}, and the program has imported no subclass of {cls.__name__} "
            "under this name. Import the module that defines it first."
        )
    return found


def rebuilt(cls: type, saved: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the arguments of ``cls`` in the hyperparameters. Create the objects that are described by ``class_path``
    and ``init_args``.

    Args:
        cls: the class that will be called with the arguments.
        saved: the hyperparameters.
        given: the names of the arguments that the caller of ``load_from_checkpoint`` passes.

    Raises:
        CheckpointError: the hyperparameters name a class that a checkpoint may not name, or do not fit ``cls``.
    """
    parser = parser_of(cls, given)
    options = options_below(parser, "module")
    defaults = as_plain(parser, parser.get_defaults()).get("module") or {}
    kept = {key: value for key, value in saved.items() if key not in given and _differs(value, defaults.get(key))}
    check_names(kept)
    config = {key: value for key, value in kept.items() if key in options}
    try:
        with _nothing_imported():
            parsed = parser.parse_object({"module": config})
    except Exception as error:  # an error of the parser, caused by values from the file
        raise CheckpointError(
            f"The hyperparameters, which LightningCLI has saved, do not fit {cls.__name__}: {error}. "
            f"Pass those that are wrong to {cls.__name__}.load_from_checkpoint."
        ) from error
    made = parser.instantiate(parsed).get("module")
    return {**kept, **({} if made is None else vars(made))}


def parser_of(cls: type, given: Collection[str] = ()) -> ArgumentParser:
    """Return a parser with an option ``--module.<argument>`` for each argument of ``cls`` that is not in ``given``."""
    parser = argument_parser.LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "module", instantiate=False, fail_untyped=False, skip={*given})
    return parser


def as_plain(parser: ArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return the parsed ``config`` as plain data, with class paths in place of objects."""
    text = parser.dump(config, format="yaml", skip_link_targets=False, skip_unset=False, skip_validation=True)
    return dict(yaml.safe_load(text) or {})


def _differs(value: Any, default: Any) -> bool:
    """Return whether a value in a checkpoint differs from the default. A default needs no check, because it comes from
    the program.
    """
    return type(value) is not type(default) or not isinstance(value, (str, dict)) or value != default


def check_names(value: Any) -> None:
    """Check the names of classes and functions in hyperparameters. A checkpoint may name only some of them.

    Raises:
        CheckpointError: the hyperparameters name such a class or function.
    """
    for path, must_be_class in _names(value):
        if must_be_class and not isinstance(_imported(path), type):
            raise CheckpointError(
                f"The hyperparameters describe an object of {path!r}, and the program has imported no class of this "
                "name that a checkpoint may name. Import the module that defines it first, or pass the object to "
                "load_from_checkpoint."
            )
        if not must_be_class and callable(_found(path)) and _imported(path) is None:
            raise CheckpointError(
                f"The hyperparameters contain {path!r}, the name of a function or a class that a checkpoint may not "
                "name. Pass this hyperparameter to load_from_checkpoint."
            )


def _names(value: Any) -> Iterator[tuple[str, bool]]:
    """Yield each text in ``value`` that the parser may read as the name of a class or a function. Also yield whether it
    must be a class.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "class_path":
                yield str(item), True
            else:
                yield from _names(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _names(item)
    elif isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split(".")):
        yield value, False


def _found(path: str) -> Any:
    """Return the object at ``path``, such as "torch.optim.SGD"; ``None`` if its module is not imported or has no such
    name. Nothing is imported.
    """
    module, _, name = path.rpartition(".")
    holder: Any = sys.modules.get(module)
    if holder is None and module:  # a nested class
        holder = _found(module)
    if holder is None or (holder is not sys.modules.get(module) and not isinstance(holder, type)):
        return None
    own = vars(holder)
    # drivetrain's modules import some names only when they are used
    if name not in own and (module.partition(".")[0] == "drivetrain" or "_compat_path" in own):
        return getattr(holder, name, None)
    return own.get(name)


def _imported(path: Any) -> Any:
    """Return the class or function at ``path``. Return ``None`` if it is not imported, or if a checkpoint may not name
    it.
    """
    found = _found(path) if isinstance(path, str) else None
    if isinstance(found, type) and issubclass(found, (nn.Module, Optimizer, LRScheduler)):
        return found
    if found is None or (name := name_of(found)) is None:
        return None
    return found if find_open(name) is found else None


def options_below(parser: ArgumentParser, key: str) -> set[str]:
    """Return the names of the options below ``key``. A dataclass argument has an option for each of its fields, such as
    "size.width".
    """
    names = (action.dest.removeprefix(f"{key}.") for action in parser._actions)
    # jsonargparse adds an option `.help` for each argument that is an object
    return {name for name in names if not name.endswith(".help")}


def _of_class(class_path: str, values: Mapping[str, Any], is_described: bool) -> dict[str, Any]:
    """Return ``{"class_path": ..., "init_args": ...}`` for a model.

    Args:
        class_path: the class.
        values: the hyperparameters.
        is_described: whether LightningCLI has saved the values. If False, leave out values that are no arguments of the
            class.
    """
    cls = _found(class_path)
    if not isinstance(cls, type):  # it is a function that returns the model
        return {"class_path": class_path, "init_args": dict(values)}
    options = options_below(parser_of(cls), "module")
    _check_groups(options, values)
    known = {name: value for name, value in values.items() if name in options}
    others = {name: value for name, value in values.items() if name not in options} if is_described else {}
    by_kwargs = {"dict_kwargs": others} if others and len(taken(cls, others)) == len(others) else {}
    return {"class_path": class_path, "init_args": known if by_kwargs else {**known, **others}, **by_kwargs}


def _check_groups(options: Collection[str], values: Mapping[str, Any]) -> None:
    """Check that each argument that is a dataclass has a dictionary of fields.

    The parser would accept any other value, and only creating the object would fail.
    """
    for name, value in values.items():
        if not isinstance(value, Mapping) and any(option.startswith(f"{name}.") for option in options):
            raise TypeError(f"The argument {name!r} is made of several options, and the file has {described(value)}.")


@contextmanager
def _raising(parser: ArgumentParser) -> Iterator[None]:
    """Context in which ``parser`` raises its errors, and does not end the program."""
    exits, parser.exit_on_error = parser.exit_on_error, False
    try:
        yield
    finally:
        parser.exit_on_error = exits


@contextmanager
def _nothing_imported() -> Iterator[None]:
    """Context in which this thread can only import modules that the parser itself needs. So a checkpoint cannot cause
    an import.
    """
    thread = threading.get_ident()

    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if threading.get_ident() == thread and name.partition(".")[0] not in _MODULES_OF_THE_PARSER:
            raise ImportError(f"the program has not imported {name!r}, and a checkpoint may not do that")

    hook: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)
