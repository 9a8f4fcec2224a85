"""Fingerprints of tensors: 64 bits that change with any bit of a value and with any move of a value."""

import functools

import torch
from torch import Tensor

# Values that share one row of weights. More rows get weights of their own, so that memory stays small.
ROW = 1 << 14
# Values that are widened to 64 bits at a time.
_AT_ONCE = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of one tensor's bits, as an int64 tensor without dimensions on the same device.

    Unlike :func:`torch.hash_tensor`, which XORs all values, it changes when two values are swapped or when one value
    fills the tensor. Equal bits have equal fingerprints on every device; ``0.0`` and ``-0.0`` differ, and so do two
    NaNs of different bits. The host does not wait for the device.

    Each value, read as an integer, is multiplied by an odd number that depends on its place, and the products are added
    modulo 2**64; so a change of one value always changes the sum of its row.
    """
    bits = _as_integers(tensor.detach())
    total = torch.full((), bits.numel(), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE]
        rows = -(-part.numel() // ROW)
        if part.numel() != rows * ROW and rows > 1:
            part = torch.nn.functional.pad(part, (0, rows * ROW - part.numel()))
        width = part.numel() // rows
        table = part.view(rows, width).to(torch.int64)
        sums = _mixed((table * _weights(bits.device, 0, width)).sum(dim=1))
        total = total + (sums * _weights(bits.device, 1 + start // ROW, rows)).sum()
    return _mixed(total)


def _as_integers(tensor: Tensor) -> Tensor:
    """The tensor's bits in one dimension, as integers of the width of its type."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


@functools.lru_cache(maxsize=64)
def _weights(device: torch.device, stream: int, count: int) -> Tensor:
    """Odd numbers that look random, the same ones in every process: a row of them for each ``stream``."""
    places = torch.arange(1, count + 1, dtype=torch.int64, device=device) + (stream << 32)
    return _mixed(places * _GOLDEN) | 1


def _mixed(values: Tensor) -> Tensor:
    """Spread each value's bits over all 64 (the last step of SplitMix64; Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """The values moved right by ``bits``, as if they had no sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
