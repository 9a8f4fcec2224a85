"""Clip sharded gradients, alone or together with plain gradients.

torch's own functions support neither DTensors of different meshes, nor DTensors together with plain tensors, nor shards
without elements. torch's functions also return the norm as a DTensor, and a comparison reads only this rank's part of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.base import torch_private
from drivetrain.strategies.sharded_state import is_dtensor, local_shard


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together. The norm is a plain tensor, equal on every rank. Every rank must call
    this function.

    Args:
        gradients: DTensors of any meshes, and plain tensors, which are complete on every rank.
        norm_type: the order of the norm; ``inf`` is the largest element.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(_sharded_over(gradient), []).append(local_shard(gradient))
    norms = [_norm_over(over, shards, norm_type) for over, shards in by_mesh.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _sharded_over(gradient: Any) -> Any:
    """Return a DTensor's mesh, and the dimensions of the mesh over which the DTensor is sharded. Return ``None`` for a
    plain tensor.
    """
    if not is_dtensor(gradient):
        return None
    dimensions = tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())
    if any(gradient.placements[index].is_partial() for index in dimensions):
        raise RuntimeError(
            f"A gradient with the placements {gradient.placements} is not reduced yet, so it has no norm. Clip after "
            "the backward pass that exchanges gradients."
        )
    return gradient.device_mesh, dimensions


def _norm_over(over: Any, shards: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients on one mesh. ``shards`` are this rank's shards of these gradients."""
    filled = [shard for shard in shards if shard.numel()]
    if filled:
        norm = torch.nn.utils.get_total_norm(filled, norm_type)
    else:  # this rank has no elements
        norm = torch.zeros((), dtype=shards[0].dtype, device=shards[0].device)
    if over is None:
        return norm
    mesh, dimensions = over
    norm = norm.to(mesh.device_type)  # offloaded shards are in host memory, which some meshes cannot exchange
    for dimension in dimensions:
        if mesh.size(dimension) > 1:
            norm = _reduced(norm, mesh.get_group(dimension), norm_type)
    return norm


def _reduced(norm: Tensor, group: Any, norm_type: float) -> Tensor:
    """Combine the norms of the parts on the ranks of ``group``."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group)
        return norm
    power = norm_type or 1.0  # the norm of order 0 is a count, so add the counts
    norm = norm**power
    dist.all_reduce(norm, dist.ReduceOp.SUM, group)
    return norm ** (1 / power)


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``. Return the original norm.

    The result equals that of ``torch.nn.utils.clip_grad_norm_`` for complete tensors. Every rank must call this
    function.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. Every rank raises this error. The check
            waits for the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = total_norm(gradients, norm_type)
    coefficient = clip_factor(norm, max_norm, norm_type, error_if_nonfinite)
    by_device: dict[torch.device, list[Tensor]] = {}
    for shard in map(local_shard, gradients):
        by_device.setdefault(shard.device, []).append(shard)
    for device, shards in by_device.items():
        torch_private.foreach_mul_(shards, coefficient.to(device))
    return norm


def clip_factor(norm: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Return the factor that scales gradients of this ``norm`` to a norm of at most ``max_norm``.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. The check waits for the device.
    """
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped. Look "
            "for a division by zero or a learning rate that is too large, or pass error_if_nonfinite=False."
        )
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clip each element of the gradients of ``parameters``."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_shard(parameter.grad).clamp_(-clip_value, clip_value)
