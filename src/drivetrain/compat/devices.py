"""Functions of Lightning's modules ``accelerators.cpu``, ``accelerators.cuda``, ``accelerators.mps`` and
``environments.lightning``.
"""

from __future__ import annotations

import os

import torch

from drivetrain.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from drivetrain.clusters.local import free_port


def get_cpu_stats() -> dict[str, float]:
    """Return how many percent of the host's processor time, memory and swap are used."""
    return CPUAccelerator().get_device_stats(torch.device("cpu"))


def get_nvidia_gpu_stats(device: torch.device | str | int) -> dict[str, float]:
    """Return the statistics of torch's allocator for ``device`` and, if nvidia-ml-py is installed, of the GPU."""
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return CUDAAccelerator().get_device_stats(place)


def get_device_stats() -> dict[str, float]:
    """Return statistics of an Apple machine, such as the percentage of used memory."""
    return MPSAccelerator().get_device_stats(torch.device("mps"))


def num_cuda_devices() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Return whether this process sees a GPU."""
    return num_cuda_devices() > 0


def find_free_network_port() -> int:
    """Return the TCP port in the environment variable ``STANDALONE_PORT``, or a free port if the variable is unset."""
    return int(os.environ["STANDALONE_PORT"]) if "STANDALONE_PORT" in os.environ else free_port()
