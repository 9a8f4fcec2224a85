"""What a device needs beside the tensors of a program: stated figures, which a plan adds to the peak.

They were chosen before any published row was compared, and are not tuned to one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.forecast.memory import Measured

GIB = 2**30
CONTEXT, NCCL, WORKSPACE, ROUNDING = 0.6 * GIB, 0.5 * GIB, 0.1 * GIB, 0.03
"""Bytes of the driver's context, of NCCL's buffers with several ranks, and of cuBLAS's and cuDNN's workspaces; and the
share of the tensors that the allocator loses by rounding to its blocks."""


def allowance(peak: int, devices: int) -> dict[str, int]:
    """Return the bytes beside ``peak`` bytes of tensors, by what they are for."""
    found = {
        "context": CONTEXT,
        "NCCL": NCCL if devices > 1 else 0,
        "workspaces": WORKSPACE,
        "rounding": ROUNDING * peak,
    }
    return {name: int(size) for name, size in found.items() if size}


def gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def needed(found: Measured, devices: int) -> int:
    """Return the bytes that the device must have."""
    return found.peak.total + sum(allowance(found.peak.total, devices).values())
