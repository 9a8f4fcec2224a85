"""Allocate and initialise parameters on the meta device, one layer at a time, after they were sharded."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.torch_private import non_persistent_buffers
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.fsdp_blocks import class_name
from drivetrain.strategies.group import Group
from drivetrain.strategies.sharded_state import is_dtensor, local_shard, shard_like


def materialise(root: nn.Module, device: torch.device, shards_on: torch.device, group: Group, loads: bool) -> bool:
    """Replace tensors on the meta device, and let each layer initialise its own; return whether there were any.

    A layer's ``reset_parameters`` gets complete tensors, of which each rank then keeps its shard, so the values are
    those of a model that one process has created; memory holds the shards and one complete layer at a time. All ranks
    draw the random numbers that rank 0 would draw.

    Args:
        root: the model, whose parameters may be DTensors.
        device: where its layers compute.
        shards_on: the device of the shards.
        group: the ranks that must get the same values.
        loads: a checkpoint's weights will be loaded later, so layers without ``reset_parameters`` are allowed.

    Raises:
        ConfigurationError: a layer has no ``reset_parameters``; the message names all of them.
    """
    layers = [each for each in root.modules() if any(tensor.is_meta for tensor in _own_tensors(each))]
    if not layers:
        return False
    names = {module: name or class_name(root) for name, module in root.named_modules()}
    without = [each for each in layers if not callable(getattr(each, "reset_parameters", None))]
    if loads:
        without = [each for each in without if non_persistent_buffers(each)]
    if without:
        raise ConfigurationError(
            f"These layers have parameters or buffers on the meta device, and no method reset_parameters() that gives "
            f"them first values: {', '.join(f'{names[each]} ({class_name(each)})' for each in without[:10])}"
            f"{'' if len(without) <= 10 else f' and {len(without) - 10} more'}. Define it for the layer's own "
            "parameters and buffers, or create these layers outside of the meta device."
        )
    replaced = _replace(layers, device, shards_on)
    before = rng_state()
    first = group.broadcast(before)
    set_rng_state(first)
    filled: set[int] = set()
    for layer in layers:
        if callable(getattr(layer, "reset_parameters", None)):
            _reset(layer, replaced, device, filled)
    if not torch.equal(before["torch"], first["torch"]):
        set_rng_state(before)  # restore the random state that this rank had before, which differs from rank 0's
    return True


def _own_tensors(layer: nn.Module) -> chain[Tensor]:
    return chain(layer.parameters(recurse=False), layer.buffers(recurse=False))


def _replace(layers: list[nn.Module], device: torch.device, shards_on: torch.device) -> set[int]:
    """Allocate every tensor on the meta device; tied parameters stay tied. Return the identities of new parameters."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    where = shards_on if is_dtensor(parameter) else device
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=where), parameter.requires_grad)
                layer._parameters[name] = made[parameter]
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.is_meta:
                layer._buffers[name] = torch.empty_like(buffer, device=device)
    return set(map(id, made.values()))


@torch.no_grad()
def _reset(layer: Any, replaced: set[int], device: torch.device, filled: set[int]) -> None:
    """Let ``layer`` initialise complete tensors; keep this rank's shards of those that no earlier layer has
    initialised.
    """
    own = {name: each for name, each in layer._parameters.items() if id(each) in replaced}
    whole = {name: nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device=device)) for name, each in own.items()}
    layer._parameters.update(whole)
    try:
        layer.reset_parameters()
    finally:
        layer._parameters.update(own)
    for name, parameter in own.items():
        if id(parameter) not in filled:
            local_shard(parameter).copy_(local_shard(shard_like(whole[name].detach(), parameter)))
            filled.add(id(parameter))
