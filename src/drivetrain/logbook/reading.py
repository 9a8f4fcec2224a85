"""Read many values with one transfer per device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_EXACT = 2**53  # a 64-bit float represents all integers below this number exactly


def read_together(values: Iterable[Any], has_float64: bool) -> tuple[list[Any], int]:
    """Return ``values`` with each tensor replaced by the number that ``tensor.item()`` returns, and the number of
    transfers.

    Tensors on one device are read together, as 64-bit floats if their dtypes differ. An integer that such a float may
    not represent exactly is read again, in a transfer of its own.

    Args:
        values: tensors with one element, and other values, which are returned unchanged.
        has_float64: whether the devices have 64-bit floats; otherwise each dtype costs a transfer.
    """
    numbers = list(values)
    groups: dict[Any, list[int]] = {}
    for position, value in enumerate(numbers):
        if isinstance(value, Tensor):
            together = has_float64 and not value.is_complex()
            groups.setdefault(value.device if together else (value.device, value.dtype), []).append(position)
    transfers = len(groups)
    for positions in groups.values():
        tensors = [numbers[position].detach() for position in positions]
        if len(tensors) == 1:
            numbers[positions[0]] = tensors[0].item()
            continue
        mixed = len({tensor.dtype for tensor in tensors}) > 1
        stacked = torch.stack([(tensor.double() if mixed else tensor).reshape(()) for tensor in tensors])
        for position, tensor, number in zip(positions, tensors, stacked.tolist(), strict=True):
            if mixed and not tensor.is_floating_point():
                exact = abs(number) < _EXACT
                number = (bool if tensor.dtype is torch.bool else int)(number) if exact else tensor.item()
                transfers += not exact
            numbers[position] = number
    return numbers, transfers


def as_tensor(value: Any) -> Tensor:
    """Return a value as a tensor with a floating dtype: float64 for a Python number, float32 for an integer tensor."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value if value.is_floating_point() else value.to(torch.float32)
