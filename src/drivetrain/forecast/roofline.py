"""Compute the shortest time of an operation on a device: the maximum of the times for its arithmetic and for its memory
accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drivetrain.forecast.devices import Device
from drivetrain.forecast.operations import Exchange, Operation

Step = Operation | Exchange


def duration(operation: Operation, device: Device, *, tf32: bool = False) -> float:
    """Return the shortest time of the operation's kernel, in seconds.

    Args:
        tf32: whether float32 matrices are multiplied in TF32, as after ``torch.set_float32_matmul_precision("high")``.
    """
    return max(arithmetic(operation, device, tf32=tf32), operation.bytes_moved / device.bandwidth)


def arithmetic(operation: Operation, device: Device, *, tf32: bool = False) -> float:
    """Return the shortest time of the floating-point operations, in seconds."""
    if not operation.flops:
        return 0.0
    dtype = "tf32" if tf32 and operation.dtype == "float32" else operation.dtype
    return operation.flops / device.rate(dtype, attention="attention" in operation.name)


def is_launched(operation: Operation) -> bool:
    """Return whether ``operation`` runs a kernel, which a view does not."""
    return bool(operation.flops or operation.bytes_moved)


def fused(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return ``steps`` after the best fusion that torch.compile could make.

    Consecutive operations without flops become one kernel. An exchange, a wait, the end of a phase, or any other
    operation except a view ends the kernel. torch.compile does not write the tensors between fused operations to
    memory, but the record does not show which tensors later operations read. The kernel is therefore assumed to move as
    many bytes as the largest of the fused operations. The optimizer and FSDP's copies are not compiled.
    """
    waits = {step.waited_on_at for step in steps if isinstance(step, Exchange)}
    kept: list[Step] = []
    at: list[int] = []
    """For each step in ``steps``, the index in ``kept``."""
    is_open = False  # whether the next operation can be fused with the last of ``kept``
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
