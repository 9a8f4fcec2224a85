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
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain import Callback

_WITH_WORKSPACE = ("aten::convolution", "aten::convolution_backward")
"""Operations whose kernels allocate and free memory of their own, which a plan has in its allowance."""


def live_tensors() -> int:
    """Return the bytes of the storages of all tensors that Python knows."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            found[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return sum(found.values())


class Windows(Callback):
    """Profiles the third window, and ends the fit after it.

    Between windows no graph is alive, so Python knows every tensor but DDP's buckets, which are as large as the
    parameters. A profile of the whole run would not do: it misses what the threads of Gloo free.
    """

    position = "last"

    def __init__(self, window: int) -> None:
        self.window, self.start = window, 0
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.window:
            self.start = live_tensors()
            if isinstance(trainer.strategy.model, DistributedDataParallel):
                self.start += sum(each.numel() * each.element_size() for each in pl_module.parameters())
            self.profile.start()
            with record_function("first"):
                pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == 3 * self.window:
            self.profile.stop()
            trainer.should_stop = True


def main(path: str, name: str, words: list[str]) -> None:
    options = programs.parsed(words)
    fit = programs.trainer(name, options)
    fit._callbacks.append(watch := Windows(int(options.get("accumulate", 1))))
    fit.fit(programs.model(name, options), programs.loader(name))
    live = peak = watch.start
    kernel_ends = 0
    collectives = []
    for each in sorted(watch.profile.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        text = each.name()
        if text == "[memory]":
            live += each.nbytes()
            peak = max(peak, live) if each.start_ns() > kernel_ends else peak
        elif text in _WITH_WORKSPACE:
            kernel_ends = max(kernel_ends, each.start_ns() + each.duration_ns())
        elif text.startswith(("c10d::", "_c10d_functional::")) and "wait" not in text and "barrier" not in text:
            collectives.append(text)
    found = {"peak": peak, "collectives": collectives, "start": watch.start}
    Path(f"{path}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found), encoding="utf-8")
