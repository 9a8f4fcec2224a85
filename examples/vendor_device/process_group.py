"""Collectives between lab's devices: staged through the host and carried by Gloo, under the name ``labccl``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class _Done(dist.Work):
    """Work that had ended before anybody could wait for it, with its result, from which DDP takes the gradients."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def _on_host(value: Any) -> Any:
    """``value`` with the tensors in it on the host; those that are there already are themselves."""
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    # Asynchronous, since collectives need not stop a program, and are not to be counted as if they did.
    return value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value


def _copy_back(value: Any, staged: Any) -> None:
    if isinstance(value, list):
        for item, staged_item in zip(value, staged, strict=True):
            _copy_back(item, staged_item)
    elif isinstance(value, Tensor) and value is not staged:
        value.copy_(staged, non_blocking=True)


def _carried(name: str) -> Callable[..., dist.Work]:
    """Gloo's method of this name, for tensors of any device. All are copied back: inputs come back unchanged."""

    def collective(self: LabCCL, *arguments: Any, **options: Any) -> dist.Work:
        staged = _on_host(list(arguments))
        getattr(self.gloo, name)(*staged, **options).wait()
        _copy_back(list(arguments), staged)
        return _Done(arguments[0] if arguments else None)  # what it was to fill or reduce comes first

    return collective


def _each(name: str) -> Callable[..., dist.Work]:
    """The same collective of several pairs of tensors, one after the other."""
    one = _carried(name)

    def collective(self: LabCCL, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            one(self, output, tensor, *options)
        return _Done(outputs)

    return collective


class LabCCL(dist.ProcessGroup):
    """What ``torch.distributed`` calls to reduce, gather or send tensors of lab.

    A vendor's library would queue the work on a stream and return at once; here it is done when a method returns. As a
    process group written in Python serves every device of its group, it takes tensors of the host as well.

    Args:
        store, rank, size, timeout: as ``torch.distributed`` hands them to the creator of a backend.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows another form only
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        for device in ("lab", "cpu"):  # torch asks a group's backends for the group's name, and what they can
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self.gloo)

    def getBackendName(self) -> str:
        return "labccl"

    allreduce = _carried("allreduce")
    allreduce_coalesced = _carried("allreduce_coalesced")
    alltoall = _carried("alltoall")
    barrier = _carried("barrier")
    broadcast = _carried("broadcast")
    gather = _carried("gather")
    allgather = _carried("allgather")
    recv = _carried("recv")
    reduce = _carried("reduce")
    reduce_scatter = _carried("reduce_scatter")
    scatter = _carried("scatter")
    send = _carried("send")
    # torch 2.13 gave these other names.
    _allgather_base = all_gather_single = _carried("_allgather_base")
    _reduce_scatter_base = reduce_scatter_single = _carried("_reduce_scatter_base")
    alltoall_base = all_to_all_single = _carried("alltoall_base")
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _each("_allgather_base")
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _each("_reduce_scatter_base")


# From here on, "labccl" is what torch.distributed.get_default_backend_for_device("lab") answers, and what
# init_process_group() without a backend takes for tensors of lab.
dist.Backend.register_backend("labccl", LabCCL, devices=["lab"])
