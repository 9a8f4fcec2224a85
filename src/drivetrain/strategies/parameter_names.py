"""Optimizer states by parameter name, as torch.distributed.checkpoint has them, and by number, as torch's files do.

torch numbers an optimizer's parameters in the order in which it got them. If a model's layers come in another order in
a later version of its code, each state would be loaded into another parameter of the same shape, without an error. A
checkpoint therefore keeps the names beside the numbers, and an optimizer's state follows its parameter's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import expect, restoring

State = dict[str, Any]
Names = list[list[str]]

# What torch.compile and activation checkpointing put into the name of a parameter.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")


def parameter_names(module: nn.Module, optimizer: Optimizer) -> Names:
    """Return the names of an optimizer's parameters, one list for each parameter group.

    They are those that ``torch.distributed.checkpoint`` uses: without what wrappers put in. The list is empty if
    ``module`` does not have all of the parameters, or has one of them under no name of its own.
    """
    known = {id(parameter): _WRAPPERS.sub("", name) for name, parameter in module.named_parameters()}
    groups = [[known.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return groups if all(map(all, groups)) else []


def by_name(state: Mapping[str, Any], names: Names) -> State:
    """Return an optimizer's state dict with names in place of numbers; ``names`` are those of its parameters."""
    named = {
        number: name
        for group, own in zip(state["param_groups"], names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    return {
        "state": {named.get(number, number): each for number, each in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def by_number(state: Mapping[str, Any], names: Names) -> State:
    """Return what :func:`by_name` has returned as the state dict of an optimizer whose parameters have ``names``."""
    numbers = {name: number for number, name in enumerate(name for own in names for name in own)}
    return {
        "state": {numbers.get(name, name): each for name, each in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def in_current_order(
    module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[Any], saved: Sequence[Any]
) -> list[Any]:
    """Return the ``states`` of a checkpoint, numbered as the optimizers number their parameters now.

    A state stays as it is where the order is the same, and where the names are others: parameters may have been
    renamed, and then their order is all there is to go by.

    Args:
        module: whose parameters the optimizers have.
        optimizers: what ``configure_optimizers`` returned.
        states: one entry for each of them, from the checkpoint.
        saved: what :func:`parameter_names` returned for each of them when it was saved.

    Raises:
        CheckpointError: ``saved`` holds something else than lists of names.
    """
    if len(saved) != len(states) or len(states) != len(optimizers):
        return list(states)
    ordered = []
    for index, (optimizer, state, then) in enumerate(zip(optimizers, states, saved, strict=True)):
        now, kind = parameter_names(module, optimizer), type(optimizer).__name__
        if now == then:
            ordered.append(state)
            continue
        with restoring(f"the parameter names of optimizer {index} ({kind})"):
            _check_names(then)
        if _same_parameters(state, now, then):
            with restoring(f"optimizer {index} ({kind})"):
                state = by_number(by_name(state, then), now)
            rank_zero_info(
                f"{kind} has its parameters in another order than when the checkpoint was saved. "
                "Each parameter's state is restored by its name."
            )
        ordered.append(state)
    return ordered


def _check_names(saved: Any) -> None:
    for index, own in enumerate(expect(saved, list)):
        for name in expect(own, list, f"[{index}]"):
            expect(name, str, f"[{index}]")


def _same_parameters(state: Any, now: Names, then: Names) -> bool:
    """Whether both name the same parameters, in groups of the sizes that ``state`` has."""
    if not isinstance(state, Mapping) or not isinstance(groups := state.get("param_groups"), list):
        return False  # a strategy's own layout; or damaged, which its check will say
    sizes = [len(each["params"]) if isinstance(each, Mapping) and "params" in each else -1 for each in groups]
    flat_now, flat_then = (sorted(name for own in names for name in own) for names in (now, then))
    return flat_now == flat_then and sizes == [len(own) for own in now] == [len(own) for own in then]
