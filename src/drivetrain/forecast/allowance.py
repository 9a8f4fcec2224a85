"""Compute the memory that a device needs in addition to a program's tensors: fixed amounts, and fragments that torch's
allocator cannot use.

The fixed amounts were not fitted to measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.forecast.memory import Measured

GIB = 2**30
CONTEXT, NCCL, WORKSPACE = 0.6 * GIB, 0.5 * GIB, 0.1 * GIB
"""The bytes of the driver's context, of NCCL's buffers (if there are several ranks), and of the workspaces of cuBLAS
and cuDNN.
"""


def allowance(found: Measured, devices: int) -> dict[str, int]:
    """Return the bytes that each purpose needs in addition to the peak of the tensors."""
    sizes = {
        "context": CONTEXT,
        "NCCL": NCCL if devices > 1 else 0,
        "workspaces": WORKSPACE,
        "fragments": found.fragments,
    }
    return {name: int(size) for name, size in sizes.items() if size}


def gib(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def needed(found: Measured, devices: int) -> int:
    """Return the bytes that the device must have."""
    return found.peak.total + sum(allowance(found, devices).values())
