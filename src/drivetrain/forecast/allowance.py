"""Memory that a device needs besides a program's tensors: fixed amounts, and the fragments that torch's allocator
cannot use.

The fixed amounts were chosen before plans were compared with measurements, and were not adjusted afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.forecast.memory import Measured

GIB = 2**30
CONTEXT, NCCL, WORKSPACE = 0.6 * GIB, 0.5 * GIB, 0.1 * GIB
"""Bytes of the driver's context, of NCCL's buffers (only with several ranks), and of cuBLAS's and cuDNN's
workspaces."""


def allowance(found: Measured, devices: int) -> dict[str, int]:
    """Return the bytes that are needed besides the peak of the tensors, by purpose."""
    sizes = {
        "context": CONTEXT,
        "NCCL": NCCL if devices > 1 else 0,
        "workspaces": WORKSPACE,
        "fragments": found.fragments,
    }
    return {name: int(size) for name, size in sizes.items() if size}


def gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def needed(found: Measured, devices: int) -> int:
    """Return the bytes that the device must have."""
    return found.peak.total + sum(allowance(found, devices).values())
