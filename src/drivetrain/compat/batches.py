"""Lightning's ``utilities.apply_func`` and ``utilities.data``: functions for batches and loaders."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.tree import batch_sizes, map_leaves, move
from drivetrain.data.loader_passes import sized_length
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import Strategy


class NoBatchError(ConfigurationError, RuntimeError):
    """This rank's loader has no batch, but another rank's loader has at least one."""


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return ``batch`` on ``device``: tensors, and other objects with a method ``to``, are moved."""
    return move(batch, torch.device(device))


def convert_to_tensors(data: Any, device: torch.device | str | int) -> Any:
    """Convert numbers and NumPy arrays in ``data`` to tensors on ``device``. A bool becomes uint8, and an int becomes
    int32.
    """
    return move_data_to_device(map_leaves(_as_tensor, data), device)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Convert each tensor in ``data`` to a Python number.

    Raises:
        ValueError: a tensor does not have exactly one element.
    """
    return map_leaves(_as_number, data)


def extract_batch_size(batch: Any) -> int:
    """Return ``tensor.size(0)`` of the batch's first tensor. Warn if this size differs between the batch's tensors.

    Raises:
        ConfigurationError: the batch contains no tensor.
    """
    sizes = list(batch_sizes(batch, parity.current().iterated_batches))
    if not sizes:
        raise ConfigurationError(
            f"A batch of type {type(batch).__name__} holds no tensor to take its size from. "
            "Write self.log(..., batch_size=...)."
        )
    if len(set(sizes)) > 1:
        rank_zero_warn(f"The tensors of a batch have first dimensions {sorted(set(sizes))}; {sizes[0]} is used.")
    return sizes[0]


def sized_len(dataloader: object) -> int | None:
    """Return ``len(dataloader)``; ``None`` if ``dataloader`` has no length."""
    return sized_length(dataloader)


def has_len(dataloader: object) -> bool:
    """Return whether the loader has a length; warn if the length is 0."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"{type(dataloader).__name__} has the length 0: it yields no batch.")
    return length is not None


def has_len_all_ranks(
    dataloader: object, strategy: Strategy, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return whether ``dataloader`` has a length; every rank must call this function.

    Rank 0 warns if no rank has a batch. Rank 0 also warns if the loader has an iterable-style dataset with a length.

    Args:
        dataloader: any iterable.
        strategy: the strategy whose ``reduce`` sums the lengths of all ranks.
        allow_zero_length_dataloader_with_multiple_devices: whether a rank without batches is allowed if another rank
            has batches.

    Raises:
        NoBatchError: this rank has no batch, other ranks have some, and
            ``allow_zero_length_dataloader_with_multiple_devices`` is False.
    """
    length = sized_len(dataloader)
    if length is None:
        return False
    name = type(dataloader).__name__
    total = int(strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum"))
    if total == 0:
        rank_zero_warn(f"{name} has the length 0 on every rank: it yields no batch.")
    elif length == 0 and not allow_zero_length_dataloader_with_multiple_devices:
        raise NoBatchError(
            f"{name} has the length 0 on this rank, and other ranks have {total} batches. Give each rank at least one, "
            "or set allow_zero_length_dataloader_with_multiple_devices = True on the module or data module."
        )
    if has_iterable_dataset(dataloader):
        rank_zero_warn(
            f"{name} has an IterableDataset with a length. With several workers, that length is wrong unless each "
            "worker yields a part of the samples."
        )
    return True


def has_iterable_dataset(dataloader: object) -> bool:
    """Return whether ``dataloader`` is a DataLoader over an iterable-style dataset."""
    return isinstance(dataloader, DataLoader) and isinstance(dataloader.dataset, IterableDataset)


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers the loader of each process should have: one less than its share of the processors, but
    at least 1.

    Args:
        local_world_size: the number of processes on this machine.

    Raises:
        ValueError: ``local_world_size`` is less than 1.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}: there is at least one process. Write 1.")
    affinity = getattr(os, "sched_getaffinity", None)  # some systems do not have this function
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, processors // local_world_size - 1)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, bool):
        return torch.tensor(leaf, dtype=torch.uint8)
    if isinstance(leaf, int):
        return torch.tensor(leaf, dtype=torch.int32)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float32)
    return torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim") else leaf


def _as_number(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.numel() != 1:
            raise ValueError(f"A tensor of shape {list(leaf.shape)} is no single number. Reduce it first.")
        return leaf.item()
    return leaf
