"""A note on an out-of-memory error: what uses the memory of the run, and what to change."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.memory import bytes_of, in_gib, is_out_of_memory
from drivetrain.base.tree import leaves
from drivetrain.loops.progress import Phase, RunningStage
from drivetrain.loops.run import Run


def memory_note(error: Exception, run: Run) -> str:
    """Return the contents of the device's memory by kind, and what to change; "" for another error."""
    if not is_out_of_memory(error):
        return ""
    device = run.engine.strategy.root_device
    held = _held(error, run, device)
    parts = ", ".join(f"{kind} {in_gib(number)}" for kind, number in held.items())
    accelerator = run.engine.strategy.accelerator
    used = None if accelerator is None else accelerator.memory_allocated(device)
    total = None if accelerator is None else accelerator.total_memory(device)
    if used is None:
        rest = "activations and the rest are not counted on this device"
    else:
        rest = f"activations and the rest {in_gib(max(0, used - sum(held.values())))}"
    limit = "" if used is None or total is None else f" ({in_gib(used)} of {in_gib(total)} in use)"
    return f"Out of memory on {device}{limit}. It holds: {parts}, {rest}. {_cures(run, held, used)} [DT1047]"


def _held(error: Exception, run: Run, device: torch.device) -> dict[str, int]:
    module, optimizers = run.module, run.engine.strategy.optimizers
    parameters: list[Tensor] = [*module.parameters(), *module.buffers()]
    gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
    of_parameters = [each for optimizer in optimizers for each in optimizer.state.values()]
    states = [each for _, each in leaves(of_parameters) if _is_tensor(each)]
    batch = [each for _, each in leaves(_batch_of(error)) if _is_tensor(each)]
    return {
        "parameters and buffers": bytes_of(parameters, device),
        "gradients": bytes_of(gradients, device),
        "optimizer state": bytes_of(states, device),
        "the batch": bytes_of(batch, device),
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _batch_of(error: Exception) -> Any:
    """Return the current batch from the frames of the loops, so that a step need not store it for this note."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [each for each in frames if each.f_globals.get("__name__", "").startswith("drivetrain.loops.")]
    found = [each.f_locals["batch"] for each in own if each.f_locals.get("batch") is not None]
    return found[-1] if found else None


def _cures(run: Run, held: dict[str, int], used: int | None) -> str:
    """Return what to change, the most likely cure first."""
    stage, strategy = run.progress.loop_stage, run.engine.strategy
    if stage is not RunningStage.TRAINING:
        cures = ["use a smaller batch_size in the loader of this stage"]
        if stage is RunningStage.PREDICTING:
            cures.append("return less from predict_step")
        else:
            cures.append("keep no outputs from batch to batch")
        return f"Change one of these: {'; '.join(cures)}."
    accumulate = run.limits.accumulate
    by_hand = not run.module.automatic_optimization
    cures = ["use a smaller batch_size"]
    if not by_hand:
        cures[0] += f" and accumulate_grad_batches={2 * accumulate}, which keeps the samples of a step"
        if not run.settings.split_on_oom:
            cures.append("write Trainer(split_on_oom=True), which runs such batches in parts")
    if run.engine.precision.name.startswith("32"):
        cures.append('write precision="bf16-mixed"')
    kept = sum(number for kind, number in held.items() if kind != "the batch")
    model_is_large = run.progress.phase is Phase.OPTIMIZER_STEP or (used is not None and kept > used / 2)
    if not strategy.facts.calls_through_forward:  # sharding strategies set calls_through_forward
        shard = 'write strategy="fsdp" on several devices, which shards parameters, gradients and optimizer state'
        cures.insert(0 if model_is_large else len(cures), shard)
    if run.progress.phase is Phase.OPTIMIZER_STEP and not held["optimizer state"]:
        size = held["parameters and buffers"]
        cures.append(f"use an optimizer with less state (Adam keeps about {in_gib(2 * size)} for this model, SGD none)")
    cures.append("compute activations again in the backward pass, with torch.utils.checkpoint")
    return f"Change one of these: {'; '.join(cures)}."
