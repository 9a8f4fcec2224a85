"""The accelerator for NVIDIA's GPUs, and for AMD's GPUs under ROCm. torch calls both "cuda"."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from drivetrain.accelerators.torch_device import TorchDeviceAccelerator
from drivetrain.base import torch_private
from drivetrain.base.rank_zero import log
from drivetrain.errors import ConfigurationError


class CUDAAccelerator(TorchDeviceAccelerator):
    """NVIDIA's GPUs, and AMD's GPUs under ROCm."""

    _names = ("cuda",)
    type = "cuda"
    auto_priority = 200
    supports_pinned_memory = True

    @classmethod
    def why_unavailable(cls) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return "this build of torch has no CUDA"
        return "torch.cuda sees no device: look at the driver and at CUDA_VISIBLE_DEVICES"

    @staticmethod
    def set_nvidia_flags(local_rank: int) -> None:
        """Number GPUs as nvidia-smi does, and log which GPUs the process of ``local_rank`` sees.

        Call this before torch first uses a GPU.
        """
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
        log.info("Local rank %s sees the CUDA devices [%s].", local_rank, seen)

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the caching allocator's counters, without waiting for the device. If nvidia-ml-py is installed, also
        return ``utilization_percent``, ``power_watts`` and ``temperature_celsius``.
        """
        return {**super().get_device_stats(device), **_nvml_stats(device)}


def _nvml_stats(device: torch.device) -> dict[str, float]:
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        # NVML ignores CUDA_VISIBLE_DEVICES, so NVML's device numbers differ from torch's. A GPU has the same UUID in
        # NVML and in torch.
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return {}
    figures: dict[str, float] = {}
    reads: dict[str, Callable[[], float]] = {
        "utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    for name, read in reads.items():
        with suppress(pynvml.NVMLError):  # values that this device or container does not provide are left out
            figures[name] = float(read())
    return figures


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the numbers of GPUs on which a tensor can be created. For example, a GPU that another process uses in
    exclusive mode is skipped.

    Args:
        num_devices: the number of GPUs to return. -1 means all usable GPUs.

    Raises:
        ConfigurationError: fewer than ``num_devices`` GPUs are usable.
    """
    seen = torch.cuda.device_count()
    usable: list[int] = []
    for index in range(seen):
        if len(usable) != num_devices:
            with suppress(RuntimeError):
                torch.empty(1, device=torch.device("cuda", index))
                usable.append(index)
    if len(usable) == num_devices or (num_devices == -1 and usable):
        return usable
    raise ConfigurationError(
        f"find_usable_cuda_devices({num_devices}): of {seen} CUDA devices, {len(usable)} can be used: {usable}. "
        "Ask for fewer, or free one."
    )


def has_cuda() -> bool:
    """Return whether torch can use a CUDA device."""
    return torch.cuda.is_available()


def memory_in_use() -> tuple[int, int]:
    """Return the number of bytes that torch has allocated on the current device, and the peak of this number since the
    last call.
    """
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), peak


def record_allocations(max_entries: int) -> None:
    """Start to record each allocation and release of memory, with its line of code. Keep the last ``max_entries``
    entries.
    """
    torch_private.record_memory(max_entries=max_entries)


def write_allocations(path: str) -> None:
    """Write a snapshot of the recorded allocations, and stop recording."""
    torch_private.write_memory(path)
    torch_private.record_memory(enabled=None)
