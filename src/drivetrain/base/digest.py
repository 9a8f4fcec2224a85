"""Compute digests of values, so that two processes can compare their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.fingerprint import fingerprints
from drivetrain.base.memory import content_of
from drivetrain.base.tree import leaves as named_leaves


def leaves(tree: Any) -> Iterator[Any]:
    """Return the tensors, numbers and texts in nested containers, such as a batch or the arguments of a module."""
    return (leaf for _, leaf in named_leaves(tree) if isinstance(leaf, (Tensor, int, float, str)))


def digest(values: Iterable[Any]) -> str:
    """Return a digest of ``values``, in 16 characters. The values are tensors, bytes, numbers and texts."""
    whole, values = hashlib.sha1(usedforsecurity=False), list(values)
    numbers = iter(numbers_of([each for each in values if isinstance(each, Tensor)]))
    for each in values:
        if isinstance(each, Tensor):
            whole.update(f"{each.dtype} {tuple(each.shape)} {next(numbers)}".encode())
        else:
            whole.update(each if isinstance(each, bytes) else repr(each).encode())
    return whole.hexdigest()[:16]


@torch.no_grad()
def numbers_of(tensors: list[Tensor]) -> list[int]:
    """Return a 64-bit fingerprint of each tensor's content. The fingerprint of a meta tensor or quantized tensor is 0.

    The function waits for the devices only once. For a tensor on the host, the fingerprint is the beginning of its
    SHA-1 digest. SHA-1 is about 20 times as fast as arithmetic on tensors.
    """
    found: list[int] = [0] * len(tensors)
    rest: list[int] = []
    for place, each in enumerate(tensors):
        if each.is_meta or each.is_quantized:
            continue
        if each.is_cpu and each.layout is torch.strided and not hasattr(each, "__tensor_flatten__"):
            found[place] = _of_host(each.detach())
        else:
            rest.append(place)
    for place, number in zip(rest, fingerprints(tensors[place] for place in rest).tolist(), strict=True):
        found[place] = number
    return found


def _of_host(tensor: Tensor) -> int:
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    summed = hashlib.sha1(content_of(whole), usedforsecurity=False)
    return int.from_bytes(summed.digest()[:8], "little", signed=True)
