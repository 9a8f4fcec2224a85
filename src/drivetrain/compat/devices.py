"""``accelerators.cpu``, ``cuda`` and ``mps``: functions that libraries import beside the accelerators."""

from __future__ import annotations

import torch

from drivetrain.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator


def get_cpu_stats() -> dict[str, float]:
    """Return percentages of processor time, memory and swap in use on this host."""
    return CPUAccelerator().get_device_stats(torch.device("cpu"))


def get_nvidia_gpu_stats(device: torch.device | str | int) -> dict[str, float]:
    """Return what the allocator and, with nvidia-ml-py, the GPU say of ``device``."""
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return CUDAAccelerator().get_device_stats(place)


def get_device_stats() -> dict[str, float]:
    """Return percentages in use on an Apple machine."""
    return MPSAccelerator().get_device_stats(torch.device("mps"))


def num_cuda_devices() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Return whether this process sees a GPU."""
    return num_cuda_devices() > 0
