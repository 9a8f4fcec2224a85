"""Measure a real run by other means than a plan's recorder: live tensors, and what torch's CPU allocator reports.

A run writes the peak of its third window, and the collectives in it with their bytes.
"""

from __future__ import annotations

import gc
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from tests.forecast import programs
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain import Callback
from drivetrain.strategies import fsdp_kept

_COLLECTIVES = {
    "c10d::allreduce_": "all_reduce", "c10d::broadcast_": "broadcast", "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter", "c10d::alltoall_base_": "all_to_all",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
}  # fmt: skip
_SIZES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4, "bool": 1}
_WITH_WORKSPACE = (
    "aten::convolution", "aten::convolution_backward", "aten::mm", "aten::addmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
"""Operations whose kernels allocate and free memory of their own, which a plan has in its allowance: of these, what is
live at their end counts.
"""


def live_tensors(model: Any = None) -> int:
    """Return the bytes of the storages of all tensors that Python knows, the gradients of ``model`` among them.

    A thread of Gloo holds the tensors of an exchange a little longer than the rank that waited for it, so the least of
    several walks counts.
    """
    return min(walked(model) for _ in range(4))


def walked(model: Any) -> int:
    """Return the bytes that one walk finds."""
    known: list[Any] = []
    if model is not None:
        known += [each.grad for each in model.parameters()]
        held = [each for _, each in fsdp_kept.parameters_in(model)]
        known += [each._unsharded_param.grad for each in held if hasattr(each, "_unsharded_param")]
        known += [each.unsharded_accumulated_grad for each in held]
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            found[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    del known
    return sum(found.values())


class Windows(Callback):
    """Profiles the third window, walks over its live tensors at hooks, and ends the fit after it.

    Between windows no graph is alive, so Python knows every tensor but DDP's buckets, which are as large as the
    parameters. In the forward pass a hook makes Python know every tensor that is saved for the backward pass. The
    profile knows temporary tensors too; it misses what the threads of Gloo free, so it is right without exchanges of
    whole parameters.
    """

    position = "last"

    def __init__(self, window: int, walks: bool) -> None:
        self.window, self.walks, self.start, self.found = window, walks, 0, dict[str, int]()
        self.saving: Any = None
        self.buckets = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.window:
            if isinstance(trainer.strategy.model, DistributedDataParallel):
                self.buckets = sum(each.numel() * each.element_size() for each in pl_module.parameters())
            self.start = live_tensors(pl_module) + self.buckets
            with record_function("third window"):
                pass
        if batch_idx == 3 * self.window - 1 and self.walks:
            self.saving = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            self.saving.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == 3 * self.window:
            with record_function("end"):
                pass


class WalkingWindows(Windows):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.saving is not None:
            self.saving.__exit__()
            self.saving = None
            self.found["before backward"] = live_tensors(pl_module) + self.buckets

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.found:
            self.found["after backward"] = live_tensors(pl_module) + self.buckets


def main(path: str, name: str, words: list[str], walks: bool = False) -> None:
    gc.collect()
    gc.freeze()  # what imports have made is not walked over
    options = programs.parsed(words)
    fit = programs.trainer(name, options, max_steps=3)
    fit._callbacks.append(watch := (WalkingWindows if walks else Windows)(int(options.get("accumulate", 1)), walks))
    loader = programs.loader(name, options)
    before = live_tensors()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as found:
        fit.fit(programs.model(name, options), loader)
    events = sorted(found.profiler.kineto_results.events(), key=lambda each: each.start_ns())  # type: ignore[union-attr]  # of torch
    names = [each.name() for each in events]  # frees of what was allocated before a profile are not in it
    events = events[names.index("third window") + 1 : names.index("end")]
    live = peak = watch.start - before
    kernel_ends = 0
    for each in events:
        if each.name() == "[memory]":
            counts = each.start_ns() > kernel_ends
            peak = max(peak, live) if counts else peak
            live += each.nbytes()
            peak = max(peak, live) if counts else peak
        elif each.name() in _WITH_WORKSPACE:
            kernel_ends = max(kernel_ends, each.start_ns() + each.duration_ns())
    lives = {hook: size - before for hook, size in {**watch.found, "start": watch.start}.items()}
    result = {"peak": peak, "exchanges": exchanges(events), "live": lives}
    Path(f"{path}.{os.environ.get('RANK', '0')}").write_text(json.dumps(result), encoding="utf-8")


def exchanges(events: list[Any]) -> list[tuple[str, int]]:
    """Return the collectives in the order of their calls, each with the bytes of its largest tensor.

    The profile has no shapes of lists of tensors; for such a call it has those of Gloo's part, which follows it.
    """
    found, waiting, whole = [], dict[str, list[int]](), 0
    for each in events:
        kind = _COLLECTIVES.get(each.name())
        if kind is None and each.name().startswith("c10d::") and "barrier" not in each.name():
            found.append([each.name(), 0])
        sizes = [
            math.prod(shape) * _SIZES[dtype]
            for shape, dtype in zip(each.shapes(), each.dtypes(), strict=True)
            if dtype in _SIZES
        ]
        if each.name() == "_c10d_functional::all_gather_into_tensor":
            whole = sizes[0] * int(each.concrete_inputs()[1])  # the number of ranks
        if kind is not None:
            found.append([kind, max(sizes, default=whole if kind == "all_gather" else 0)])
            waiting.setdefault("all_reduce" if kind == "reduce_scatter" else kind, []).append(len(found) - 1)
        elif each.name().startswith("gloo:") and waiting.get(kind := each.name()[5:]):
            at = waiting[kind].pop(0)
            found[at][1] = max([found[at][1], *sizes])
    return [(name, size) for name, size in found]
