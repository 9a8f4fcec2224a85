"""Fetch a batch of tensors with one index operation per tensor, instead of one per sample.

[Note: which loaders]
A ``DataLoader`` over a ``TensorDataset``, over a ``StackDataset`` of tensors, or over a ``Subset`` of these, with
torch's default collate. Only torch's own unchanged classes are supported, so that no user code is skipped. A batch then
equals the stacked samples in values, dtype, strides and type. All other loaders are fetched sample by sample, as in
torch; so is any single batch with indices that are not plain integers or are out of range, or with a tensor that is not
dense and contiguous in host memory.

Without workers, a batch for a device that copies from pinned memory is written into pinned memory at once, so that its
copy does not make the host wait. A copy into pinned memory afterwards would cost the host more than it saves.

The user's loader and data set do not change. A copy of the loader is iterated; it shares the samplers and the
generator, so the same random numbers are drawn.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from drivetrain.base.rank_zero import log, rank_zero_only
from drivetrain.data.resample import replaced

L = TypeVar("L")


def start_pass(loader: Any, pins: bool = False) -> Iterator[Any]:
    """Start a pass over any loader: ``iter(loader)``, with batches fetched as a whole if possible.

    Persistent workers belong to the user's loader, as they do after ``iter(loader)``.

    Args:
        loader: the loader.
        pins: whether the batches are for a device that copies from pinned memory.
    """
    source = batched(loader, pins)
    if source is loader:
        started: Iterator[Any] = iter(loader)
        return started
    source._iterator = loader._iterator
    iterator: Iterator[Any] = iter(source)
    loader._iterator = source._iterator
    return iterator


def batched(loader: L, pins: bool = False) -> L:
    """Return a copy of ``loader`` that fetches each batch as a whole, or ``loader`` itself if that is not possible.

    ``pins``: batches that are fetched in this process are in pinned memory.
    """
    if not isinstance(loader, DataLoader) or reason_for_samples(loader) is not None:
        return loader
    fetch = _Fetch(loader.dataset, pins and loader.num_workers == 0)
    changes: dict[str, Any] = {"dataset": fetch, "collate_fn": fetch.collate}
    if loader.worker_init_fn is not None:
        changes["worker_init_fn"] = SeesDataset(loader.worker_init_fn, fetch)
    return replaced(loader, **changes)


@rank_zero_only
def log_fetching(loader: Any) -> None:
    """Log at DEBUG, on the logger named "drivetrain", whether batches of ``loader`` are fetched as a whole."""
    if not (isinstance(loader, DataLoader) and log.isEnabledFor(logging.DEBUG)):
        return
    reason = reason_for_samples(loader)
    way = "with one index operation per tensor" if reason is None else f"sample by sample, because {reason}"
    log.debug("%s over %s: batches are fetched %s", type(loader).__name__, type(loader.dataset).__name__, way)


def reason_for_samples(loader: DataLoader[Any]) -> str | None:
    """Return why the samples of ``loader`` are fetched one by one; ``None`` if its batches are fetched as a whole."""
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is a subclass of DataLoader"
    if loader.batch_sampler is None:
        return "it has no batch size"
    if loader.collate_fn is not default_collate or not all(map(_is_torchs, default_collate_fn_map.values())):
        return "its collate_fn is not torch's default"
    data: Any = loader.dataset
    while type(data) is Subset:
        if not _is_unchanged(data):
            return "Subset was changed"
        if type(data.indices) not in _SEQUENCES and not _is_array(data.indices):
            return f"the indices of its Subset are a {type(data.indices).__name__}"
        data = data.dataset
    tensors = _tensors(data)
    if tensors is None:
        return f"its dataset contains a {type(data).__name__} that is not one of torch's, made of tensors"
    return None if all(map(_is_plain, tensors)) else "a tensor is not dense and contiguous in the memory of the host"


class _Fetch:
    """Replaces a data set in a DataLoader; its method ``collate`` replaces ``default_collate``.

    A DataLoader calls ``collate(dataset.__getitems__(indices))``.
    """

    def __init__(self, dataset: Any, pins: bool) -> None:
        self.dataset = dataset
        self._pins = pins

    def __getitems__(self, indices: Any) -> Any:
        return indices

    def collate(self, indices: Any) -> Any:
        """Return the batch of the samples ``indices``."""
        batch = _whole(self.dataset, indices, self._pins)
        if batch is not None:
            return batch
        several = getattr(self.dataset, "__getitems__", None)
        return default_collate(several(indices) if several else [self.dataset[index] for index in indices])


class SeesDataset:
    """Wraps a user's ``worker_init_fn``, so that ``get_worker_info()`` returns the user's data set.

    Args:
        user: the function, or ``None`` without one.
        replacement: what replaces the data set in the loader, with the data set in its attribute ``dataset``.
    """

    def __init__(self, user: Callable[[int], None] | None, replacement: Any) -> None:
        self._user, self._replacement = user, replacement

    def __call__(self, worker_id: int) -> None:
        # __setattr__ of the worker's info raises
        object.__setattr__(get_worker_info(), "dataset", self._replacement.dataset)
        if self._user is not None:
            self._user(worker_id)


def _whole(data: Any, indices: Any, pins: bool) -> Any:
    """Return the batch, or ``None`` if its samples must be fetched one by one."""
    if type(indices) is not list:
        return None
    try:
        while type(data) is Subset:
            if "__getitems__" in vars(data) or set(map(type, indices)) != _INTEGERS:
                return None
            chosen: Any = data.indices
            if type(chosen) in _SEQUENCES:
                indices = list(map(chosen.__getitem__, indices))
            elif _is_array(chosen):
                indices = chosen[indices].tolist()
            else:
                return None
            data = data.dataset
        tensors = _tensors(data)
        if tensors is None or set(map(type, indices)) != _INTEGERS or not all(map(_is_plain, tensors)):
            return None
        positions = torch.frombuffer(array("q", indices), dtype=torch.int64)
        parts = [torch.index_select(tensor, 0, positions, out=_pinned_rows(tensor, len(indices)) if pins else None)
                 for tensor in tensors]  # fmt: skip
    # an index is negative or out of range, or torch has no such kernel
    except (IndexError, OverflowError, NotImplementedError):
        return None
    if type(data) is Tensor:
        return parts[0]
    if type(data) is StackDataset and type(data.datasets) is dict:
        return dict(zip(data.datasets, parts, strict=True))
    return parts


def _pinned_rows(tensor: Tensor, count: int) -> Tensor:
    """Return pinned memory for ``count`` rows of ``tensor``."""
    return torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device, pin_memory=True)


def _tensors(data: Any) -> Any:
    """Return the tensors of ``data``; ``None`` if it is not one of torch's classes, or does not consist of tensors."""
    if type(data) is Tensor:
        return (data,)
    if type(data) not in (TensorDataset, StackDataset) or not _is_unchanged(data):
        return None
    parts = data.tensors if type(data) is TensorDataset else data.datasets
    if type(parts) is dict:
        return parts.values()
    return parts if type(parts) is tuple else None


def _is_plain(tensor: Any) -> bool:
    """Whether selecting rows of ``tensor`` gives the same result as stacking its samples."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() > 0  # with empty rows, torch does not check the range of indices
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_array(indices: Any) -> bool:
    """Whether ``indices`` is a 1-D array of integers, from torch or NumPy."""
    if type(indices) is Tensor:
        return indices.dtype is torch.int64 and indices.dim() == 1
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(indices) is numpy.ndarray and indices.dtype.kind == "i" and indices.ndim == 1


def _is_unchanged(data: Any) -> bool:
    """Whether the samples of ``data`` come from torch's own methods, which programs may replace on a class or an
    object.
    """
    kind, own = type(data), vars(data)
    return "__getitems__" not in own and all(_is_torchs(getattr(kind, name, None)) for name in _METHODS)


def _is_torchs(function: Any) -> bool:
    return function is None or getattr(function, "__module__", None) in _TORCHS


_SEQUENCES = (list, tuple, range)
_INTEGERS = {int}
_METHODS = ("__getitem__", "__getitems__")
_TORCHS = (TensorDataset.__module__, default_collate.__module__)
