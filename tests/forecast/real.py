"""Measure a real run by other means than a plan's recorder: the allocations that torch's CPU allocator reports.

``python real.py FILE MODEL [name=value ...]`` writes the peak of the second window, and the collectives in it.
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


class Windows(Callback):
    """Names the beginning of each batch in the profile, and ends the fit after two windows."""

    def __init__(self, window: int) -> None:
        self.window = window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with record_function(f"batch {batch_idx}"):
            pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with record_function(f"end {batch_idx}"):
            pass
        if batch_idx + 1 == 2 * self.window:
            trainer.should_stop = True


def main(path: str, name: str, words: list[str]) -> None:
    options = programs.parsed(words)
    window = int(options.get("accumulate", 1))
    torch.set_num_threads(1)
    loader = programs.loader(name)
    fit = programs.trainer(name, options)
    fit._callbacks.append(Windows(window))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        fit.fit(programs.model(name, options), loader)
    events = sorted(found.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    live = peak = 0
    inside = False
    collectives = []
    for each in events:
        text = each.name()
        if text == f"batch {window}":
            inside, peak = True, live
        elif text == f"end {2 * window - 1}":
            inside = False
        elif text == "[memory]":
            live += each.nbytes()
            peak = max(peak, live) if inside else peak
        elif inside and text.startswith("c10d::") and text != "c10d::barrier":
            collectives.append([text, each.shapes()])
    rank = os.environ.get("RANK", "0")
    Path(f"{path}.{rank}").write_text(json.dumps({"peak": peak, "collectives": collectives}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
