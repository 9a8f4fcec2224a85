"""The replicas of a torch_xla job, which communicate through torch_xla's collectives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.packages import xla_model, xla_runtime
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.group import Group, all_or_alone
from drivetrain.strategies.peers import CURES, as_bytes, dumped, loaded


class XLAGroup(Group):
    """All replicas of a job that ``xmp.spawn`` has started; a single replica is also a group.

    Tensors are exchanged on the device, as recorded operations; objects are pickled, which waits for the device. A
    replica unpickles only objects that another replica of the same job has pickled.

    Args:
        device: the device of this replica.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = int(xla_runtime.global_ordinal())
        self.ranks = range(int(xla_runtime.world_size()))

    def gather_objects(self, obj: Any) -> list[Any]:
        data, problem = dumped(obj)
        if problem is not None:
            raise ConfigurationError(f"gather_objects() got {problem}. {CURES['gather_objects']}")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.inference_mode(False):
            sizes = self._stacked(torch.tensor(len(mine), device=self.device)).tolist()
            padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
            rows = self._stacked(padded.to(self.device)).cpu()
        each = zip(self.ranks, rows, sizes, strict=True)
        return [obj if rank == self.rank else loaded(as_bytes(row[:size]), self.device) for rank, row, size in each]

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
            return _Gather.apply(tensor, self)  # type: ignore[no-untyped-call]
        return self._stacked(tensor.detach())

    def _stacked(self, tensor: Tensor) -> Tensor:
        """Return every replica's tensor, stacked, on the device of this replica's tensor."""
        if tensor.is_complex():
            return torch.view_as_complex(self._stacked(torch.view_as_real(tensor)))
        # torch_xla gathers by summation, which booleans do not support
        numbers = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
        gathered: Tensor = xla_model.all_gather(numbers.to(self.device).unsqueeze(0), dim=0)
        return gathered.to(dtype=tensor.dtype, device=tensor.device)

    def total(self, tensor: Tensor) -> None:
        """Sum every replica's ``tensor``, which is on the device, in place."""
        xla_model.all_reduce(xla_model.REDUCE_SUM, [tensor])

    def broadcast(self, obj: Any, src: int | None = None) -> Any:
        src = 0 if src is None else src
        form = (obj.shape, obj.dtype) if isinstance(obj, Tensor) else None
        forms = self.gather_objects(form if self.rank == src else None)
        if (theirs := forms[src]) is None:
            return self.gather_objects(obj if self.rank == src else None)[src]

        shape, dtype = theirs
        like = obj if isinstance(obj, Tensor) else torch.empty(0, device=self.device)
        # Other replicas send zeros instead of their values: torch_xla sums, and NaN times 0 is NaN.
        mine = like.detach() if self.rank == src else torch.zeros(shape, dtype=dtype)
        summed = torch.uint8 if dtype is torch.bool else dtype  # torch_xla does not sum booleans
        sent = mine.to(device=self.device, dtype=summed, copy=True)
        xla_model.collective_broadcast([sent], root_ordinal=src)
        return sent.to(device=like.device, dtype=dtype)

    def barrier(self, name: str | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # xm.rendezvous itself calls a deprecated function
            xla_model.rendezvous("" if name is None else name)

    def new(self, ranks: Sequence[int]) -> Group:
        why = "the replicas of torch_xla exchange all together. Use the group of all ranks."
        return all_or_alone(self, ranks, why)


class _Gather(torch.autograd.Function):
    """Every replica's tensor, stacked; the gradient of this replica's tensor is the sum of all gradients of its
    slice.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: XLAGroup) -> Tensor:
        ctx.group = group
        return group._stacked(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        home = gradients[0].device
        stack = gradients[0].to(device=ctx.group.device, copy=True).contiguous()
        ctx.group.total(stack)
        return stack[ctx.group.rank].to(home), None
