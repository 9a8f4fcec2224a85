"""Compute fingerprints of tensors: 64 bits that change if a value, or the order of the values, changes."""

import functools
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from drivetrain.base.torch_private import PARTS_OF_SPARSE
from drivetrain.errors import NotSupportedError

ROW = 1 << 14
"""The number of values in a row. All rows share one set of weights, which saves memory. Another weight multiplies the
sum of each row.
"""
_AT_ONCE = 1 << 20  # the number of values to convert to 64 bits at a time
# A 64-bit value is read as two 32-bit values. Otherwise, two flips of the highest bit would cancel each other modulo
# 2**64, for example if 0.0 and -0.0 are swapped.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_HOST = torch.device("cpu")
_INDICES = {  # for each sparse layout, the methods that return the indices and the values
    torch.sparse_coo: PARTS_OF_SPARSE,
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """Return the fingerprint of each tensor's bits in one int64 tensor, with few operations for many small tensors.

    A fingerprint changes when two values are swapped, unlike :func:`torch.hash_tensor`, which XORs all values. Equal
    bits have equal fingerprints on every device. ``0.0`` and ``-0.0`` have different fingerprints, and so have NaNs of
    different bits. The fingerprint depends on the number and the bits of the values, but not on shape and dtype. The
    host does not wait for the device. Each value is read as an integer and multiplied by an odd number that depends on
    the value's index. The products are added modulo 2**64. So the fingerprint always changes if a single value of at
    most 32 bits changes.

    The fingerprint of a sharded tensor covers this process's shard. The fingerprint of any other tensor subclass covers
    its inner tensors. The fingerprint of a sparse tensor covers the stored indices and values. The result is on the
    first device that is not the host, or on the host if all tensors are there.

    Raises:
        NotSupportedError: a tensor is a meta tensor or a quantized tensor, whose bits cannot be read.
    """
    bits = [as_integers(tensor) for tensor in tensors]
    devices = list(dict.fromkeys(flat.device for flat in bits))
    target = next((device for device in devices if device != _HOST), _HOST)
    found: dict[int, Tensor] = {}
    for device in devices:
        places = [place for place, flat in enumerate(bits) if flat.device == device]
        here = _on_one_device([bits[place] for place in places], device).to(target, non_blocking=True)
        found.update(zip(places, here.unbind(), strict=True))
    if not bits:
        return torch.empty(0, dtype=torch.int64, device=_HOST)
    return torch.stack([found[place] for place in range(len(bits))])


def _on_one_device(bits: list[Tensor], device: torch.device) -> Tensor:
    """Return the fingerprint of each flat integer tensor. All tensors are on ``device``."""
    weights = _weights(device, 0, ROW)
    rows: list[list[Tensor]] = [[] for _ in bits]
    tails: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for place, flat in enumerate(bits):
        full = flat.numel() - flat.numel() % ROW
        for start in range(0, full, _AT_ONCE):
            table = flat[start : min(start + _AT_ONCE, full)].view(-1, ROW)
            rows[place].append(table.to(torch.int64).mul_(weights).sum(dim=1))
        if full != flat.numel():
            tails.setdefault(flat.dtype, []).append((place, flat[full:]))
    for rests in tails.values():
        for start in range(0, len(rests), _AT_ONCE // ROW):
            some = rests[start : start + _AT_ONCE // ROW]
            counts = [rest.numel() for _, rest in some]
            products = torch.cat([weights[:count] for count in counts]).mul_(torch.cat([rest for _, rest in some]))
            sums = _sums(products, counts)
            for (place, _), total in zip(some, sums.view(-1, 1).unbind(), strict=True):
                rows[place].append(total)
    counts = [-(-flat.numel() // ROW) for flat in bits]
    of_rows = _weights(device, 1, 1 << max(counts).bit_length())
    values = [part for parts in rows for part in parts] or [weights[:0]]
    sums = _sums(_mixed(torch.cat(values)) * torch.cat([of_rows[:count] for count in counts]), counts)
    return _mixed(sums + torch.tensor([flat.numel() for flat in bits], device=_HOST).to(device, non_blocking=True))


def _sums(values: Tensor, counts: list[int]) -> Tensor:
    """Split ``values`` into consecutive parts, and return the sum of each part. ``counts`` has the lengths of the
    parts.
    """
    until = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    return torch.stack([until[end] for end in accumulate(counts, initial=0)]).diff()


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as a flat tensor of integers with at most 32 bits each."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in inner if isinstance(part, Tensor)]  # the other attributes are not tensors
    elif names := _INDICES.get(tensor.layout):
        parts = [getattr(tensor.detach(), name)() for name in names]
    elif tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        raise NotSupportedError(
            f"A fingerprint reads the bits of a tensor, and there are none to read in one with dtype={tensor.dtype}, "
            f"device={tensor.device} and layout={tensor.layout}. Leave this tensor out, or pass a dense copy of it."
        )
    else:
        flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = flat.resolve_neg().contiguous().view(-1)
        return flat.view(_INTEGERS[flat.element_size()])
    flats = [as_integers(part) for part in parts]
    return flats[0] if len(flats) == 1 else torch.cat([flat.to(torch.int32) for flat in flats])


@functools.lru_cache(maxsize=64)
def _weights(device: torch.device, stream: int, count: int) -> Tensor:
    """Return ``count`` pseudorandom odd numbers, which are the same in every process. Each ``stream`` has different
    numbers.
    """
    places = torch.arange(1, count + 1, dtype=torch.int64, device=device) + (stream << 32)
    return _mixed(places * _GOLDEN) | 1


def _mixed(values: Tensor) -> Tensor:
    """Mix the bits of each value, with the last step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift the values right by ``bits``, as if they were unsigned integers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
