"""A small stand-in of torch_xla: its own functions under their own names, for replicas on torch's CPU device.

The devices that torch_xla has on the processor cannot exchange anything between replicas, and no test machine has a
TPU. With this module, what drivetrain's strategy asks of torch_xla runs in several processes: a replica is a thread of
a forked process, as torch_xla starts one, and exchanges over Gloo. What is recorded and compiled there is computed at
once here, so this says nothing about compilation.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CALLS: list[Any] = []  # what this process has asked for, in order: ("sync",), ("rendezvous", tag), ...


class Replica:
    """This process's place in the job; alone until :func:`spawn` has made it one of several."""

    rank, size = 0, 1
    group: Any = None
    started = False
    seed = 0


def device(index: int | None = None) -> torch.device:
    Replica.started = True
    return torch.device("cpu")


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    CALLS.append(("sync",))


# ---- torch_xla.core.xla_model ----------------------------------------------------------------------------------------


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True) -> Any:
    """Add up in place where it gets a list, and into a new tensor where it gets a tensor, as torch_xla does."""
    assert reduce_type == "sum"
    tensors = [inputs.clone()] if isinstance(inputs, torch.Tensor) else inputs
    for tensor in tensors:
        if Replica.size > 1:
            Replica.group.allreduce([tensor]).wait()
        if scale != 1.0:
            tensor.mul_(scale)
    return tensors[0] if isinstance(inputs, torch.Tensor) else inputs


def all_gather(value: torch.Tensor, dim: int = 0, groups: Any = None, **options: Any) -> torch.Tensor:
    """Concatenate along ``dim``: torch_xla does not stack."""
    assert value.dim() > 0, "torch_xla gathers no tensor without dimensions"
    padding = [0] * (2 * value.dim())
    index = value.dim() - 1 - dim
    padding[2 * index] = Replica.rank * value.size(dim)
    padding[2 * index + 1] = (Replica.size - 1 - Replica.rank) * value.size(dim)
    gathered: torch.Tensor = all_reduce("sum", torch.nn.functional.pad(value, padding))
    return gathered


def collective_broadcast(tensors: list[torch.Tensor], root_ordinal: int = 0, **options: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(torch.tensor(int(Replica.rank == root_ordinal), dtype=tensor.dtype))
    all_reduce("sum", tensors)


def rendezvous(tag: str, payload: bytes = b"", replicas: Any = ()) -> list[bytes]:
    assert isinstance(tag, str)
    CALLS.append(("rendezvous", tag))
    all_reduce("sum", [torch.zeros(1)])
    return [payload] * Replica.size


def send_cpu_data_to_device(datas: Any, where: Any, input_sharding: Any = None) -> list[Any]:
    CALLS.append(("upload",))
    return list(datas)


def get_rng_state(device: Any = None) -> int:
    return Replica.seed


def set_rng_state(seed: int, device: Any = None) -> None:
    Replica.seed = seed


# ---- torch_xla.distributed -------------------------------------------------------------------------------------------


def spawn(
    fn: Callable[..., Any], args: Any = (), nprocs: int | None = None, join: bool = True, start_method: str = "spawn"
) -> None:
    """Run ``fn`` in every replica, each in a thread of a process of its own; one runs here."""
    CALLS.append(("spawn", nprocs, start_method))
    if nprocs == 1:
        fn(0, *args)
        return
    if nprocs is not None:
        raise ValueError(f"Unsupported nprocs ({nprocs}). Please use nprocs=1 or None")
    if Replica.started:
        raise RuntimeError("Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.")
    size = int(os.environ["CPU_NUM_DEVICES"])
    with tempfile.TemporaryDirectory() as folder:
        context: Any = torch.multiprocessing.get_context(start_method)
        with concurrent.futures.ProcessPoolExecutor(size, mp_context=context) as executor:
            list(executor.map(functools.partial(_in_thread, fn, args, size, f"{folder}/store"), range(size)))


def _in_thread(fn: Callable[..., Any], args: Any, size: int, store: str, rank: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(_replica, fn, args, size, store, rank).result()


def _replica(fn: Callable[..., Any], args: Any, size: int, store: str, rank: int) -> None:
    torch.set_num_threads(1)
    CALLS.clear()
    Replica.rank, Replica.size, Replica.started = rank, size, True
    Replica.group = dist.ProcessGroupGloo(dist.FileStore(store, size), rank, size)
    fn(rank, *args)


class ParallelLoader:
    """Loads ahead in torch_xla; here when it is asked."""

    def __init__(self, cpu_loader: Any, devices: Any, **options: Any) -> None:
        self.batches = iter(cpu_loader)
        CALLS.append(("parallel loader", [str(each) for each in devices]))

    def per_device_loader(self, device: Any) -> Iterator[Any]:
        for batch in self.batches:
            sync()
            yield send_cpu_data_to_device([batch], device)[0]

    def close(self) -> None:
        CALLS.append(("parallel loader closed",))


class MpDeviceLoader:
    def __init__(self, loader: Any, device: Any, **options: Any) -> None:
        self._loader, self._device, self._parallel_loader_kwargs = loader, device, options
        self._parallel_loader: Any = None

    def __len__(self) -> int:
        return len(self._loader)


def modules() -> dict[str, ModuleType]:
    """The stand-in under torch_xla's names."""
    names = ("", ".runtime", ".core", ".core.xla_model", ".distributed", ".distributed.xla_multiprocessing",
             ".distributed.parallel_loader", ".debug", ".debug.profiler")  # fmt: skip
    made = {f"torch_xla{name}": ModuleType(f"torch_xla{name}") for name in names}
    root = made["torch_xla"]
    root.__spec__ = ModuleSpec("torch_xla", None)
    vars(root).update(device=device, sync=sync, _XLAC=SimpleNamespace(_xla_runtime_is_initialized=_is_started))
    vars(made["torch_xla.runtime"]).update(
        world_size=lambda: Replica.size, global_ordinal=lambda: Replica.rank, local_ordinal=lambda: Replica.rank,
        host_index=lambda: 0, device_type=lambda: "CPU", is_spmd=lambda: False,
        addressable_device_count=lambda: 1, local_device_count=lambda: Replica.size,
    )  # fmt: skip
    vars(made["torch_xla.core.xla_model"]).update(
        REDUCE_SUM="sum", all_reduce=all_reduce, all_gather=all_gather, collective_broadcast=collective_broadcast,
        rendezvous=rendezvous, send_cpu_data_to_device=send_cpu_data_to_device, get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
    )  # fmt: skip
    vars(made["torch_xla.distributed.xla_multiprocessing"]).update(spawn=spawn)
    vars(made["torch_xla.distributed.parallel_loader"]).update(
        MpDeviceLoader=MpDeviceLoader, ParallelLoader=ParallelLoader
    )
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


def _is_started() -> bool:
    return Replica.started


def install() -> None:
    """Let this process, and those that are copied from it, import the stand-in as torch_xla."""
    sys.modules.update(modules())
