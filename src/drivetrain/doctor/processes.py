"""Checks whether two processes on this machine can exchange tensors, and how fast."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in the stubs

from drivetrain.accelerators.accelerator import HOST
from drivetrain.clusters.local import LocalEnvironment, free_port
from drivetrain.doctor.checks import NOTE, Finding, Items
from drivetrain.doctor.devices import Kind, available
from drivetrain.errors import text_of
from drivetrain.strategies.meeting import meet

_TIMEOUT = timedelta(seconds=20)
_MIB, _SMALL, _LARGE = 1 << 20, 50, 4  # _SMALL and _LARGE are numbers of repetitions
_SLOWEST_MIB_S, _LONGEST_S = 20, 0.05


def check(rank: int, folder: str) -> Items:
    """Sum tensors over two ranks with Gloo on the CPU. If there are two devices of a kind, also sum tensors on them."""
    pairs = [("gloo", [HOST, HOST])]
    for kind in available():
        if isinstance(kind, Kind) and len(kind.devices) > 1:
            pairs.append((kind.accelerator.process_group_backend, kind.devices))
    ports = FileStore(os.path.join(folder, "ports"), 2)
    for number, (backend, devices) in enumerate(pairs):
        if rank == 0:
            ports.set(str(number), str(free_port()))
        port = ports.get(str(number)).decode()
        environment = LocalEnvironment({"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port})
        try:
            yield from _exchange(backend, devices[rank], environment, rank)
        except Exception as error:
            yield Finding(
                f"Two processes cannot exchange tensors over {backend}: {type(error).__name__}: "
                f"{' '.join(text_of(error).split())}", "Strategies with several processes fail on this machine.",
                "unset NCCL_* and GLOO_* variables; allow connections to 127.0.0.1 in the firewall or container.",
            )  # fmt: skip
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _exchange(backend: str, device: torch.device, environment: LocalEnvironment, rank: int) -> Items:
    if device is not HOST:
        torch.accelerator.set_device_index(device)
    meet(backend, environment, rank, 2, 1, _TIMEOUT)
    seconds = {}
    for size, repeats in ((1, _SMALL), (8 * _MIB // 4, _LARGE)):
        values = torch.ones(size, device=device)
        dist.all_reduce(values)  # connects the ranks
        dist.barrier()
        started = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(values)
        total = float(values.double().sum())  # reading the value waits for the device
        seconds[size] = (time.perf_counter() - started) / repeats
        if total != size * 2.0 ** (repeats + 1):
            yield Finding(
                f"Over {backend}, a sum of two ranks is {total:g} in place of {size * 2.0 ** (repeats + 1):g}.",
                "Replicas are trained with wrong gradients.", "NCCL_P2P_DISABLE=1 as a test, and report it.",
            )  # fmt: skip
    latency, rate = min(seconds.values()), 8 / max(seconds.values())
    if rank:
        return
    yield f"{backend}: {rate:.0f} MiB/s, {latency * 1e6:.0f} us for a number"
    if rate < _SLOWEST_MIB_S or latency > _LONGEST_S:
        yield Finding(
            f"Two processes sum tensors over {backend} at {rate:.0f} MiB/s, and one number in {latency * 1e3:.1f} ms.",
            "Ranks wait for each other's gradients.",
            "fewer ranks than cores, and fewer threads: OMP_NUM_THREADS.", NOTE,
        )  # fmt: skip
