"""Measure a real run by other means than a plan's recorder: the allocations that torch's CPU allocator reports.

``python real.py FILE MODEL [name=value ...]`` writes the peak of the third window, and the collectives in it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain import Callback

sys.path.insert(0, str(Path(__file__).parent))
import programs


_WITH_WORKSPACE = ("aten::convolution", "aten::convolution_backward")
"""Operations whose kernels allocate and free memory of their own, which a plan has in its allowance."""


class Windows(Callback):
    """Names the beginning of each batch in the profile, and ends the fit after three windows."""

    def __init__(self, window: int) -> None:
        self.window = window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with record_function(f"batch {batch_idx}"):
            pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with record_function(f"end {batch_idx}"):
            pass
        if batch_idx + 1 == 3 * self.window:
            trainer.should_stop = True


def main(path: str, name: str, words: list[str]) -> None:
    options = programs.parsed(words)
    window = int(options.get("accumulate", 1))
    torch.set_num_threads(1)
    loader = programs.loader(name)
    fit = programs.trainer(name, options)
    fit._callbacks.append(Windows(window))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, acc_events=True) as found:
        fit.fit(programs.model(name, options), loader)
    events = sorted(found.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    live = peak = 0
    inside, kernel_ends = False, 0
    collectives = []
    for each in events:
        text = each.name()
        if text == f"batch {2 * window}":
            inside, peak = True, live
        elif text == f"end {3 * window - 1}":
            inside = False
        elif text == "[memory]":
            live += each.nbytes()
            peak = max(peak, live) if inside and each.start_ns() > kernel_ends else peak
        elif text in _WITH_WORKSPACE:
            kernel_ends = max(kernel_ends, each.start_ns() + each.duration_ns())
        elif inside and text.startswith("c10d::") and text not in ("c10d::barrier",):
            collectives.append([text, each.shapes()])
    rank = os.environ.get("RANK", "0")
    Path(f"{path}.{rank}").write_text(json.dumps({"peak": peak, "collectives": collectives}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
