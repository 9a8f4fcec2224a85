"""Lightning's ``utilities.memory``: detect out-of-memory errors, and free memory."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.base.memory import free_memory
from drivetrain.base.tree import detach, move_to_host


def is_oom_error(exception: BaseException) -> bool:
    """Return whether ``exception`` is an out-of-memory error, of a device or of the host."""
    return is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether ``exception`` is an out-of-memory error of a device, not only of a CUDA device."""
    return isinstance(exception, torch.OutOfMemoryError) or _says(exception, "out of memory")


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether cuDNN raised ``exception`` because it could not allocate its workspace."""
    return _says(exception, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether ``exception`` means that the host's memory ran out."""
    start = "DefaultCPUAllocator:"
    return _says(exception, f"{start} can't allocate memory", f"{start} not enough memory")


garbage_collection_cuda = free_memory


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Detach the tensors in ``in_dict``. With ``to_cpu``, also move them to host memory."""
    return move_to_host(in_dict) if to_cpu else detach(in_dict)


def _says(exception: BaseException, *texts: str) -> bool:
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in texts)
