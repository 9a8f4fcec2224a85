"""Recognize out-of-memory errors, and read the size and the bytes of tensors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.tree import is_dtensor
from drivetrain.errors import text_of

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error. For host memory, torch raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _TEXTS)


def free_memory() -> None:
    """Collect garbage, and return the device's unused memory to the system."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return how many bytes ``tensors`` use on ``device``. Shared memory counts once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if is_dtensor(local) else local  # type: ignore[attr-defined]
        if local.device == device and local.numel():
            try:
                storage = local.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own, such as a sparse one
                storages[id(tensor)] = local.numel() * local.element_size()
    return sum(storages.values())


def content_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in host memory. The caller must keep the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def contents_of(records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the bytes of each record. A record is a tensor, a storage or bytes. Only one tensor at a time
    is copied to host memory.
    """
    for name, record in records:
        if isinstance(record, torch.UntypedStorage):
            record = torch.empty(0, dtype=torch.uint8, device=record.device).set_(record)
        if isinstance(record, Tensor):
            # these calls copy only if necessary
            record = record.detach().resolve_conj().resolve_neg().cpu().contiguous()
        yield name, content_of(record) if isinstance(record, Tensor) else record


def in_gib(number: int) -> str:
    """Return a number of bytes in GiB, with more digits if the number is small."""
    gib = number / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 or not number else f"{gib:.2g} GiB"
