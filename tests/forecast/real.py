"""Measure a real run by other means than a plan's recorder: live tensors, and what torch's CPU allocator reports.

A run writes the peak of its third window, and the collectives in it.
"""

from __future__ import annotations

import gc
import json
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

_WITH_WORKSPACE = ("aten::convolution", "aten::convolution_backward")
"""Operations whose kernels allocate and free memory of their own, which a plan has in its allowance."""


def live_tensors(model: Any = None) -> int:
    """Return the bytes of the storages of all tensors that Python knows, the gradients of ``model`` among them."""
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
    options = programs.parsed(words)
    fit = programs.trainer(name, options, max_steps=3)
    fit._callbacks.append(watch := (WalkingWindows if walks else Windows)(int(options.get("accumulate", 1)), walks))
    loader = programs.loader(name)
    before = live_tensors()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        fit.fit(programs.model(name, options), loader)
    live = peak = 0
    is_third = False
    kernel_ends = 0
    collectives = []
    for each in sorted(found.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        text = each.name()
        if text == "third window":
            is_third, live = True, watch.start - before
        elif text == "end":
            is_third = False
        elif text == "[memory]":
            live += each.nbytes()
            peak = max(peak, live) if is_third and each.start_ns() > kernel_ends else peak
        elif text in _WITH_WORKSPACE:
            kernel_ends = max(kernel_ends, each.start_ns() + each.duration_ns())
        elif is_third and text.startswith("c10d::") and "wait" not in text and "barrier" not in text:
            collectives.append(text)
    lives = {hook: size - before for hook, size in {**watch.found, "start": watch.start}.items()}
    result = {"peak": peak, "collectives": collectives, "live": lives}
    Path(f"{path}.{os.environ.get('RANK', '0')}").write_text(json.dumps(result), encoding="utf-8")
