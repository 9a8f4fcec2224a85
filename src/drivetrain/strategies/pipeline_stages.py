"""The stages of a model in a pipeline: which rank holds each parameter, and the state of one rank's stages."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, described
from drivetrain.strategies.optimizer_states import parameters_of
from drivetrain.strategies.pipeline_schedule import HOOK


def configured(module: nn.Module, num_stages: int, processes: int) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Return the result of the hook ``configure_pipeline``.

    Raises:
        ConfigurationError: the module does not define it, or it returns something else.
    """
    name, hook = type(module).__name__, getattr(module, HOOK, None)
    if hook is None:
        raise ConfigurationError(
            f"{name} has no method {HOOK}, and PipelineStrategy asks it for the stages. Define "
            f"{HOOK}(self, num_stages) so that it returns a list of num_stages modules, made of the layers of "
            "self, and a loss function(output, target)."
        )
    result = hook(num_stages)
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (Sequence, nn.ModuleList))
    if not pair or not all(isinstance(each, nn.Module) for each in result[0]) or not callable(result[1]):
        raise ConfigurationError(
            f"{name}.{HOOK} returned {described(result)}. Return (stages, loss_function): a list of modules, and "
            "a function of the last stage's output and the target."
        )
    stages, loss = list(result[0]), result[1]
    if len(stages) != num_stages:
        raise ConfigurationError(
            f"{name}.{HOOK} returned {len(stages)} stage{'s' if len(stages) > 1 else ''}, and {num_stages} "
            f"are needed: {processes} processes with {num_stages // processes} each. Return as many as num_stages."
        )
    return stages, loss


def owned_by(module: nn.Module, stage_list: Sequence[nn.Module], processes: int) -> dict[str, int]:
    """Return the rank of a pipeline for each parameter and buffer that is in a stage.

    Raises:
        ConfigurationError: a parameter is in several stages, in no stage, or not in the module.
    """
    stages: dict[int, set[int]] = {}
    for number, stage in enumerate(stage_list):
        for tensor in (*stage.parameters(), *stage.buffers()):
            stages.setdefault(id(tensor), set()).add(number)
    names, name = named(module), type(module).__name__
    trained = dict(module.named_parameters(remove_duplicate=False))
    outside = [each for each in trained if id(trained[each]) not in stages]
    if outside:
        raise ConfigurationError(
            f"{name}.{HOOK} leaves {', '.join(outside[:5])} in no stage, so no process would train it. Make it a "
            "part of a stage."
        )
    tied = [each for each in names if len(stages.get(id(names[each]), ())) > 1]
    if tied:
        raise ConfigurationError(
            f"{name}.{HOOK} puts {', '.join(tied[:5])} into several stages, whose processes would train it apart. "
            "Put the layers that share it into one stage."
        )
    known = {id(tensor) for tensor in names.values()}
    foreign = [number for number, stage in enumerate(stage_list) for each in stage.parameters()
               if id(each) not in known]  # fmt: skip
    if foreign:
        raise ConfigurationError(
            f"Stage {foreign[0]} of {name}.{HOOK} has parameters that {name} has not, so its optimizer does not "
            "train them. Make stages of layers that are attributes of the module."
        )
    return {each: min(stages[id(names[each])]) % processes for each in names if id(names[each]) in stages}


def named(module: nn.Module) -> dict[str, Tensor]:
    """Yield the module's parameters and buffers; a shared one is yielded under each of its names."""
    parameters = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def keep(module: nn.Module, owners: Mapping[str, int], index: int) -> None:
    """Move parameters and buffers of other ranks to the meta device, which frees their memory; names and shapes
    stay.
    """
    made: dict[int, Tensor] = {}
    there = named(module)
    for name, owner in owners.items():
        if owner == index:
            continue
        path, _, own = name.rpartition(".")
        layer, tensor = module.get_submodule(path), there[name]
        empty = torch.empty_like(tensor, device="meta")
        if own in layer._parameters:
            empty = nn.Parameter(empty, tensor.requires_grad)
        setattr(layer, own, made.setdefault(id(tensor), empty))


def trained_stages(stages: Sequence[nn.Module]) -> tuple[bool, ...]:
    """Return for each stage whether it or an earlier stage has a trained parameter; the result is the same on all
    ranks.
    """
    own = (any(each.requires_grad for each in stage.parameters()) for stage in stages)
    return tuple(itertools.accumulate(own, operator.or_))


def place_own(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the parameters and buffers that this rank holds."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)
    return module


def load_own(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the optimizer states of the parameters that this rank holds."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    elsewhere = {number for number, each in zip(numbers, parameters_of(optimizer), strict=True) if each.is_meta}
    own = {number: each for number, each in state["state"].items() if number not in elsewhere}
    optimizer.load_state_dict({**state, "state": own})
