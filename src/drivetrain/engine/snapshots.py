"""Convert named objects and values to the content of one file and back, for ``Engine.save`` and ``Engine.load``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain import parity
from drivetrain.base.compiled import own_names
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import check_optimizer_state, check_scheduler_state, naming, restoring
from drivetrain.base.torch_private import hooks_before_loading, own_modules
from drivetrain.checkpoints.plain import decode, encode
from drivetrain.data.stateful import is_stateful
from drivetrain.engine.wrappers import EngineModule, unwrapped
from drivetrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    IncompleteCheckpointError,
    WrongTypeError,
    described,
    did_you_mean,
    shown,
)
from drivetrain.precision.precision import Precision

Filters = Mapping[str, Callable[[str, Any], bool]]


class States(Protocol):
    """How a strategy saves and loads the states of modules and optimizers.

    Attributes:
        loads_modules, loads_optimizers: whether the strategy has its own method for loading the state of a module or of
            an optimizer. This method then checks whether a state fits.
    """

    @property
    def loads_modules(self) -> bool: ...

    @property
    def loads_optimizers(self) -> bool: ...

    def module_state(self, module: nn.Module) -> dict[str, Any]: ...

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None: ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]: ...

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None: ...


def of(state: Mapping[str, Any], filters: Filters, states: States) -> dict[str, Any]:
    """Return ``state`` as plain data. The strategy returns the states of modules and optimizers. Other objects with a
    method ``state_dict`` are replaced by the result of this method. Other values are unchanged.

    Raises:
        CheckpointError: an entry cannot be stored as plain data.
        ConfigurationError: ``state`` is not a dictionary, or a filter names an entry that is missing or is not a
            dictionary.
    """
    if not isinstance(state, Mapping):
        raise wrong_argument("save", state, "state")
    if not isinstance(filters, Mapping):
        raise WrongTypeError(
            f"Engine.save got {described(filters)} as the filter. Pass a dictionary with a function (key, value) -> "
            "bool for each name, or leave the filter out."
        )
    for name in state:
        if not isinstance(name, str):
            raise ConfigurationError(f"The state has the key {shown(name)}, and names are texts. Write {str(name)!r}.")
    snapshot = {
        name: states.optimizer_state(unwrapped(value)) if isinstance(value, Optimizer)
        else states.module_state(original(value)) if isinstance(value, nn.Module)
        else value.state_dict(*parts(state)) if isinstance(value, Precision)
        else value.state_dict() if is_stateful(value) else value
        for name, value in state.items()
    }  # fmt: skip
    for name, keeps in filters.items():
        if name not in snapshot:
            raise ConfigurationError(f"filter names {name!r}, which is not saved. {did_you_mean(name, snapshot)}")
        if not isinstance(snapshot[name], Mapping) or not callable(keeps):
            raise WrongTypeError(
                f"filter={{{name!r}: ...}} needs a dictionary to filter and a function (key, value) -> bool, and got "
                f"{described(snapshot[name])} and {described(keeps)}. Leave the filter out."
            )
        snapshot[name] = {key: value for key, value in snapshot[name].items() if keeps(key, value)}
    return snapshot if parity.current().pickle else {name: encode(value, name) for name, value in snapshot.items()}


def into(state: Any, checkpoint: Any, strict: bool, path: str, states: States) -> dict[str, Any]:
    """Load ``checkpoint`` into the objects of ``state``, and return the checkpoint's remaining entries.

    The function checks all states before it loads the first state, so that a failure leaves all objects unchanged.

    Raises:
        CheckpointError: a state does not fit.
    """
    with naming(path):
        return _into(state, checkpoint, strict, path, states)


def _into(state: Any, checkpoint: Any, strict: bool, path: str, states: States) -> dict[str, Any]:
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} holds {described(checkpoint)} and no dictionary. Use another file.")
    held = {name: decode(value, str(name)) for name, value in checkpoint.items()}
    if state is None:
        return held
    if not isinstance(state, MutableMapping):
        raise wrong_argument("load", state, "state")
    missing = [name for name in state if name not in held]
    if missing and strict:
        raise IncompleteCheckpointError(
            f"{path} has no {', '.join(map(repr, missing))}, only {sorted(map(str, held))}. "
            "Leave that out of the state, or pass strict=False."
        )
    found = [name for name in state if name in held]
    for name in found:
        where = f"{path}: {name}"
        if is_stateful(state[name]) and not isinstance(held[name], Mapping):
            raise CheckpointError(f"{where} is {described(held[name])} and no state dict. Use another file.")
        if isinstance(state[name], nn.Module) and not states.loads_modules:
            held[name] = own_names(original(state[name]), held[name])
            _check_fits(state[name], held[name], strict, where)
        with restoring(f"{name} ({type(state[name]).__name__})"):
            if isinstance(state[name], Optimizer) and not states.loads_optimizers:
                check_optimizer_state(held[name], state[name])
            elif isinstance(state[name], LRScheduler):
                check_scheduler_state(held[name], state[name])
    pairs = {name: (state[name], held[name]) for name in found if is_stateful(state[name])}
    _restore(pairs, parts(state), strict, states)
    for name in found:
        value = held.pop(name)
        if not is_stateful(state[name]):
            state[name] = value
    return held


def _restore(
    pairs: Mapping[str, tuple[Any, Any]],
    of_precision: tuple[nn.Module | None, Sequence[Optimizer]],
    strict: bool,
    states: States,
) -> None:
    """Load each object's state. If an object raises, restore the old states of the objects that were loaded before it.

    Modules and optimizers are loaded last. Their old states are not copied, because their new states were already
    checked. A precision is loaded before modules and optimizers, because only the precision itself can detect that its
    state is damaged. The precision is loaded a second time at the end, because a Trainer also loads it after modules
    and optimizers.
    """
    late = (Precision, Optimizer, nn.Module)
    names = sorted(pairs, key=lambda name: [isinstance(pairs[name][0], kind) for kind in reversed(late)])
    with ExitStack() as undo:
        for name in (*names, *(name for name in names if isinstance(pairs[name][0], Precision))):
            target, value = pairs[name]
            with restoring(f"{name} ({type(target).__name__})"):
                if not isinstance(target, late):
                    undo.callback(target.load_state_dict, copy.deepcopy(target.state_dict()))
                if isinstance(target, nn.Module) and states.loads_modules:
                    states.load_module_state(original(target), value, strict)
                elif isinstance(target, nn.Module):
                    target.load_state_dict(value, strict=strict)
                elif isinstance(target, Optimizer) and states.loads_optimizers:
                    states.load_optimizer_state(unwrapped(target), value)
                elif isinstance(target, Precision):
                    target.load_state_dict(value, *of_precision)
                else:
                    target.load_state_dict(value)
        undo.pop_all()


def parts(state: Mapping[str, Any]) -> tuple[nn.Module | None, list[Optimizer]]:
    """Return the module and the optimizers of ``state``, which a precision needs to save and load its state.

    If there are several modules, they become children of a new module, under their names in ``state``.
    """
    modules = {name: original(value) for name, value in state.items() if isinstance(value, nn.Module)}
    optimizers = [unwrapped(value) for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) < 2:
        return next(iter(modules.values()), None), optimizers
    several = nn.Module()
    own_modules(several).update(modules)  # add_module refuses names with a dot
    return several, optimizers


def wrong_argument(method: str, given: Any, name: str) -> WrongTypeError:
    """Return the error for a path or state with a wrong type in a call of ``Engine.save`` or ``Engine.load``."""
    return WrongTypeError(
        f"Engine.{method} got {described(given)} as the {name}. Pass the path first, and then a dictionary with a name "
        f'for each object: engine.{method}("state.ckpt", {{"model": model}}).'
    )


def original(module: nn.Module) -> nn.Module:
    """Return the original module behind an EngineModule. Return any other module unchanged."""
    return module.module if isinstance(module, EngineModule) else module


def _check_fits(module: nn.Module, weights: Any, strict: bool, where: str) -> None:
    if any(hooks_before_loading(child) for child in module.modules()):
        return  # the module's load hooks may rename entries, so only ``load_state_dict`` can check the names
    own = module.state_dict()
    missing = [key for key in own if key not in weights]
    unexpected = [key for key in weights if key not in own]
    if missing and weights and not strict and len(unexpected) == len(weights):
        rank_zero_warn(
            f"{where}: {type(module).__name__} has no parameter of any name in it (the first is {unexpected[0]!r}), so "
            "strict=False leaves its weights as they are. Load it into the module that it was saved from."
        )
    wrong = [
        f"{key} ({tuple(weights[key].shape)} for {tuple(value.shape)})"
        for key, value in own.items()
        if isinstance(weights.get(key), Tensor)
        and isinstance(value, Tensor)
        and not is_lazy(value)
        and weights[key].shape != value.shape
    ]
    if wrong or (strict and (missing or unexpected)):
        found = [
            f"{what}: {', '.join(map(str, keys))}"
            for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
            if keys
        ]
        raise CheckpointMismatchError(
            f"{where} does not fit {type(module).__name__} ({'; '.join(found)}). "
            "Build the module as it was trained; for missing or unexpected names only, pass strict=False."
        )
