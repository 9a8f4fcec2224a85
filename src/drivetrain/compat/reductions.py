"""Lightning's ``fabric.utilities.distributed``: functions that reduce tensors over the ranks. If there is no process
group, they return their argument.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from drivetrain.base.packages import dist_nn


def _distributed_is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _sync_ddp_if_available(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    """Reduce ``result`` over the ranks in place, and return ``result``.

    Args:
        result: the value of this rank.
        group: the ranks; ``None``: all ranks.
        reduce_op: an operation of torch, or its name, such as "sum" or "mean"; ``None``: the sum.
    """
    if not _distributed_is_initialized():
        return result
    name = reduce_op.lower() if isinstance(reduce_op, str) else None
    if name in ("mean", "avg") or reduce_op is dist.ReduceOp.AVG:  # gloo does not support the mean
        dist.all_reduce(result, dist.ReduceOp.SUM, group)
        return result.copy_(result / dist.get_world_size(group))
    operation = dist.ReduceOp.SUM if reduce_op is None else getattr(dist.ReduceOp, name.upper()) if name else reduce_op
    dist.all_reduce(result, operation, group)
    return result


def _all_gather_ddp_if_available(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Return ``torch.stack`` of all ranks' tensors; without a process group, return ``tensor``."""
    if not _distributed_is_initialized():
        return tensor

    gather: Any = dist_nn.all_gather
    with nullcontext() if sync_grads else torch.no_grad():
        return torch.stack(list(gather(tensor.contiguous(), group or dist.group.WORLD)))


def _get_default_process_group_backend_for_device(device: torch.device) -> str:
    """Return the name of torch's default backend for this type of device."""
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")
