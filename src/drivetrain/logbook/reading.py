"""Read many values with one transfer per device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_EXACT = 2**53  # a 64-bit float represents all integers below this number exactly


def read_together(values: Iterable[Any], has_float64: bool) -> tuple[list[Any], int]:
    """Return ``values`` with each tensor replaced by ``tensor.item()``, and the number of transfers. Tensors on one
    device are read in one transfer, as 64-bit floats if the dtypes differ. If a 64-bit float may be inexact for an
    integer, another transfer reads the integer.

    Args:
        values: tensors with one element, and other values. Other values are returned unchanged.
        has_float64: whether the devices have 64-bit floats. If not, each dtype needs a transfer.
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
    """Return a value as a tensor of floats. A Python number becomes float64, and an integer tensor becomes float32."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value if value.is_floating_point() else value.to(torch.float32)
