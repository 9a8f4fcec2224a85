"""Compute the shortest time of an operation on a device: the time of its arithmetic or of its memory accesses,
whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drivetrain.forecast.devices import Device
from drivetrain.forecast.operations import Exchange, Operation

Step = Operation | Exchange


def duration(operation: Operation, device: Device, *, tf32: bool = False) -> float:
    """Return the seconds that ``operation`` takes at best, once its kernel has started.

    Args:
        tf32: float32 matrices are multiplied in TF32 (``torch.set_float32_matmul_precision("high")``).
    """
    return max(arithmetic(operation, device, tf32=tf32), operation.bytes_moved / device.bandwidth)


def arithmetic(operation: Operation, device: Device, *, tf32: bool = False) -> float:
    """Return the seconds that the floating-point operations alone take at best."""
    if not operation.flops:
        return 0.0
    dtype = "tf32" if tf32 and operation.dtype == "float32" else operation.dtype
    return operation.flops / device.rate(dtype, attention="attention" in operation.name)


def is_launched(operation: Operation) -> bool:
    """Return whether ``operation`` runs a kernel: a view does not."""
    return bool(operation.flops or operation.bytes_moved)


def fused(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return ``steps`` fused as torch.compile would fuse them in the best case.

    Operations that only move data become one kernel if no matrix operation, exchange or wait is between them.
    torch.compile does not write the tensors between fused operations. The record does not say which tensors later
    operations read. So the kernel is taken to move as many bytes as the largest of the fused operations. The optimizer
    and FSDP's copies are not compiled.
    """
    waits = {step.waited_on_at for step in steps if isinstance(step, Exchange)}
    kept: list[Step] = []
    at: list[int] = []
    """For each of ``steps``, its index in ``kept``."""
    is_open = False  # whether the last of ``kept`` is a kernel that the next operation may join
    for index, step in enumerate(steps):
        if isinstance(step, Operation) and _joins(step):
            last = kept[-1] if kept else None
            if is_open and index not in waits and isinstance(last, Operation) and last.phase == step.phase:
                kept[-1] = max(last, step, key=lambda each: each.bytes_moved)
            else:
                kept.append(step)
            is_open = True
        elif isinstance(step, Exchange) or is_launched(step):
            kept.append(step)
            is_open = False
        else:  # a view
            is_open = is_open and index not in waits
            at.append(len(kept))
            continue
        at.append(len(kept) - 1)
    at.append(len(kept))
    return tuple(
        replace(each, waited_on_at=at[min(each.waited_on_at, len(steps))]) if isinstance(each, Exchange) else each
        for each in kept
    )


def _joins(operation: Operation) -> bool:
    is_compiled = operation.phase in ("forward", "recompute", "backward") and not operation.name.startswith("fsdp.")
    return is_compiled and not operation.flops and operation.bytes_moved > 0
