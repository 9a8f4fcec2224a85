"""Match the optimizer states of a checkpoint with the run's optimizers, by the names of parameters.

torch's ``state_dict`` numbers the parameters of an optimizer in the order in which the optimizer got the parameters. If
a later version of the user's code reorders a model's layers, torch would load states into wrong parameters of the same
shape, without an error. A checkpoint therefore contains names beside the numbers, and each state is loaded by the name
of its parameter. Names have the form that torch.distributed.checkpoint uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import WrongForm, check_optimizer_state, expect, restoring
from drivetrain.base.torch_private import class_in_shards
from drivetrain.errors import CheckpointError, first_of

State = dict[str, Any]
Names = list[list[str]]

_OR_WEIGHTS = "or load only the weights: load_from_checkpoint(path)."
# Prefixes that torch.compile and activation checkpointing add to parameter names.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and activation checkpointing."""
    return _WRAPPERS.sub("", name)


def parameter_names(module: nn.Module, optimizer: Optimizer) -> Names:
    """Return the names of an optimizer's parameters, one list for each parameter group.

    As in ``torch.distributed.checkpoint``, the names have no prefixes of wrappers. A tied parameter gets the
    alphabetically first of its names, which does not depend on the order of the layers. A parameter outside ``module``
    gets a name such as "parameter 0 that is in no module".
    """
    known: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        known[id(parameter)] = min(name, known.get(id(parameter), name))
    unnamed = (f"parameter {number} that is in no module" for number in count())
    return [
        [known.get(id(parameter)) or next(unnamed) for parameter in group["params"]] for group in optimizer.param_groups
    ]


def by_name(state: Mapping[str, Any], names: Names) -> State:
    """Return an optimizer's state dict in which ``names`` replace the numbers of parameters."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return _keyed(state, dict(zip(numbers, chain(*names), strict=True)), names)


def by_number(state: Mapping[str, Any], names: Names) -> State:
    """Undo :func:`by_name`, for an optimizer whose parameters have ``names``."""
    numbers = {name: number for number, name in enumerate(chain(*names))}
    return _keyed(state, numbers, [[numbers[name] for name in own] for own in names])


def _keyed(state: Mapping[str, Any], keys: Mapping[Any, Any], lists: Sequence[Sequence[Any]]) -> State:
    """Replace the keys of parameters in an optimizer's state dict. ``keys`` maps each old key to the new key. ``lists``
    contains the new keys of each parameter group.
    """
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], lists, strict=True)]
    return {"state": {keys.get(key, key): each for key, each in state["state"].items()}, "param_groups": groups}


def describe(module: nn.Module, optimizer: Optimizer) -> State:
    """Return the class name of an optimizer and the names of its parameters. A checkpoint stores the class name and the
    parameters' names beside the optimizer's state.
    """
    return {"class": _class_of(optimizer), "parameters": parameter_names(module, optimizer)}


def _class_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class. For torch's ZeroRedundancyOptimizer, return the name of the inner
    optimizer's class.
    """
    return (class_in_shards(optimizer) or type(optimizer)).__name__


def restore(strategy: Any, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load the optimizers' states from a checkpoint. The states contain options such as the learning rate. Log each
    option that they change.

    Args:
        strategy: the strategy that holds the optimizers.
        module: the module that holds the optimizers' parameters.
        checkpoint: contains ``optimizer_states`` and, except in checkpoints of earlier versions, ``optimizers`` with
            the results of :func:`describe`.

    Raises:
        CheckpointError: as in :func:`fitted`.
    """
    before = [_options(optimizer) for optimizer in strategy.optimizers]
    states = fitted(module, strategy.optimizers, checkpoint["optimizer_states"], checkpoint.get("optimizers", ()))
    strategy.load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
    for index, (optimizer, groups) in enumerate(zip(strategy.optimizers, before, strict=True)):
        now = _options(optimizer)
        changed = {
            name: f"{name}={group[name]} instead of {new}"
            for group, then in zip(now, groups, strict=False)
            for name, new in then.items()
            if name in group and group[name] != new
        }
        if changed:
            rank_zero_info(
                f"Optimizer {index} ({_class_of(optimizer)}) continues with {', '.join(changed.values())}, as the "
                "checkpoint says. To change that, set it in on_train_start."
            )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the plain options of each parameter group. If a scheduler has stored the initial learning rate, ``lr`` in
    the result is the initial learning rate.
    """
    found = [
        {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}
        for group in optimizer.param_groups
    ]
    for group in found:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")
    return found


def fitted(
    module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[Any], saved: Sequence[Any] = ()
) -> list[Any]:
    """Return the ``states`` of a checkpoint in the form that this run's optimizers can load.

    If a parameter group has the same parameters in a different order, the group's states are renumbered in the current
    order. If some names are not in the checkpoint, the states keep their order, because only the order can identify a
    renamed parameter.

    Args:
        module: the module that holds the optimizers' parameters.
        optimizers: the optimizers from ``configure_optimizers``.
        states: the checkpoint's state of each optimizer.
        saved: the result of :func:`describe` for each optimizer when the checkpoint was saved; empty for checkpoints of
            other libraries and of earlier versions.

    Raises:
        CheckpointError: the parameter groups differ, an optimizer of a different class cannot continue from the state,
            or ``saved`` is damaged.
    """
    if len(states) != len(optimizers):
        return list(states)  # the states have a strategy's own format, or are damaged, which loading reports
    known = []
    for index, optimizer in enumerate(optimizers):
        with restoring(f"the description of optimizer {index} ({_class_of(optimizer)})"):
            known.append(_checked(saved[index] if len(saved) == len(states) else {}))
    names = [parameter_names(module, optimizer) for optimizer in optimizers]
    _compare_places(optimizers, names, [then for _, then in known])
    return [_fitted(index, *each) for index, each in enumerate(zip(optimizers, states, names, known, strict=True))]


def _compare_places(optimizers: Sequence[Optimizer], now: Sequence[Names], then: Sequence[Names]) -> None:
    """Check that no parameter has moved to another group or optimizer. In another group, the parameter would get other
    options and another scheduler.

    Raises:
        CheckpointError: a parameter has moved. The message names the parameter and both groups.
    """
    places_now, places_then = (
        {name: (index, group) for index, groups in enumerate(each) for group, own in enumerate(groups) for name in own}
        for each in (now, then)
    )
    if places_now.keys() != places_then.keys() or list(map(len, now)) != list(map(len, then)):
        return  # renamed parameters are allowed; _compare_groups() reports different counts
    for name, (index, group) in places_now.items():
        if places_then[name] != (index, group):
            earlier, earlier_group = places_then[name]
            raise CheckpointError(
                f"When the checkpoint was saved, {name} was in parameter group {earlier_group} of optimizer {earlier}, "
                f"and now it is in group {group} of optimizer {index} ({_class_of(optimizers[index])}). Return the "
                f"optimizers and their groups in the same order from configure_optimizers, {_OR_WEIGHTS}"
            )


def _fitted(index: int, optimizer: Optimizer, state: Any, now: Names, saved: tuple[str, Names]) -> Any:
    kind, (was, then) = _class_of(optimizer), saved
    if not isinstance(state, Mapping) or not isinstance(groups := state.get("param_groups"), list):
        return state  # the state has a strategy's own format, or is damaged, which loading reports
    listed = [each.get("params") if isinstance(each, Mapping) else None for each in groups]
    sizes = [len(each) if isinstance(each, list) else -1 for each in listed]
    named = [len(own) for own in then] == sizes
    _compare_groups(f"optimizer {index} ({kind})", optimizer, sizes, now, then if named else [])
    if was and was != kind:
        _compare_classes(index, optimizer, state, was)
    if not named or now == then or sorted(chain(*now)) != sorted(chain(*then)):
        return state
    with restoring(f"optimizer {index} ({kind})"):
        state = by_number(by_name(state, then), now)
    rank_zero_info(
        f"{kind} has its parameters in another order than when the checkpoint was saved. "
        "Each parameter's state is restored by its name."
    )
    return state


def _checked(saved: Any) -> tuple[str, Names]:
    """Return the class and the names that a checkpoint has stored for an optimizer."""
    expect(saved, {"parameters?": (list, [(list, [str])]), "class?": str})
    return saved.get("class", ""), saved.get("parameters", [])


def _compare_groups(which: str, optimizer: Optimizer, sizes: list[int], now: Names, then: Names) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    if -1 in sizes or own == sizes:
        return
    if len(own) != len(sizes):
        raise CheckpointError(
            f"When the checkpoint was saved, {which} had {len(sizes)} parameter groups, and now it has {len(own)}. "
            f"Return the same groups from configure_optimizers, {_OR_WEIGHTS}"
        )
    index = next(index for index, (mine, saved) in enumerate(zip(own, sizes, strict=True)) if mine != saved)
    differ = ""
    if now and then:
        gone = sorted(set(then[index]) - set(now[index]))
        new = sorted(set(now[index]) - set(then[index]))
        differ = "".join(
            f" {word}: {first_of(names, 5)}." for word, names in (("Missing now", gone), ("New", new)) if names
        )
    raise CheckpointError(
        f"When the checkpoint was saved, parameter group {index} of {which} had {sizes[index]} parameters, and now it "
        f"has {own[index]}.{differ} Return the same groups from configure_optimizers, {_OR_WEIGHTS}"
    )


def _compare_classes(index: int, optimizer: Optimizer, state: Mapping[str, Any], was: str) -> None:
    kind = _class_of(optimizer)
    try:
        check_optimizer_state(state, optimizer)
    except WrongForm as error:
        raise CheckpointError(
            f"The checkpoint was saved with {was} as optimizer {index}, and configure_optimizers now returns {kind}, "
            f"which cannot continue from that state: {error}. Return {was}, {_OR_WEIGHTS}"
        ) from error
    rank_zero_warn(
        f"The checkpoint was saved with {was} as optimizer {index}, and configure_optimizers now returns {kind}. It "
        f"continues from {was}'s state, and takes over the options in it, such as the learning rate."
    )
