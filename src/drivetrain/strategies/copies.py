"""Find the ranks that have copies of a tensor, and the tensors that make up the state of a model and its optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.compiled import plain_names
from drivetrain.base.tree import parameters_of
from drivetrain.strategies.sharded_state import is_dtensor
from drivetrain.strategies.strategy import Strategy


def ranks_with_copies(strategy: Strategy, tensor: Tensor) -> tuple[int, ...]:
    """Return this rank and all other ranks that have the same values of ``tensor``.

    All ranks of the data group have the same values of a plain tensor. For a DTensor, the result contains the ranks
    along each mesh dimension with the placement ``Replicate``.
    """
    if not is_dtensor(tensor):
        return tuple(strategy.data.ranks)
    sharded: Any = tensor
    mesh = sharded.device_mesh
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(sharded.placements, mesh.get_coordinate(), strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def named_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield parameters, buffers and optimizer states, in the same order on all ranks. Meta tensors and quantized
    tensors are left out.

    Yields:
        Three values for each tensor. First, a name such as "layer.weight" or "exp_avg of layer.weight". Second, the
            name of the parameter or buffer alone, or "" if the module does not have the parameter. Third, the tensor.
    """
    named = plain_names({**dict(module.named_parameters()), **dict(module.named_buffers())})
    names = {id(tensor): name for name, tensor in named.items()}
    yield from ((name, name, tensor) for name, tensor in named.items() if _has_values(tensor))
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            name = names.get(id(parameter), "")
            of = f"{name or f'parameter {place}'}{f' in optimizer {number}' if number else ''}"
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and _has_values(value):
                    yield f"{key} of {of}", name, value


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or tensor.is_quantized)
