"""How long a DataLoader's two workers take to start, in seconds until an epoch's first batch.

Each start method runs in a process of its own, in turn, because the server of "forkserver" lives as long as the process
that has started it. The first epoch also starts that server; the table shows the later ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from report import print_table, versions, write_json
from torch.utils.data import DataLoader, Dataset

EPOCHS = 3
METHODS = ["fork", "spawn", "forkserver", "forkserver, preloaded"]


class Samples(Dataset[Any]):
    """64 samples that cost nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4)


def first_batches(method: str, persistent: bool) -> list[float]:
    """The seconds until the first batch of each epoch."""
    name, _, preloads = method.partition(", ")
    if preloads:
        multiprocessing.set_forkserver_preload(["torch.utils.data"])
    loader = DataLoader(Samples(), 8, num_workers=2, multiprocessing_context=name, persistent_workers=persistent)
    seconds = []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        batches = iter(loader)
        next(batches)
        seconds.append(time.perf_counter() - begin)
        for _ in batches:
            pass
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all times to this file")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "PERSISTENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(first_batches(arguments.one[0], arguments.one[1] == "True")))
        return
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for method in METHODS:
            for persistent in (False, True):
                done = subprocess.run(
                    [sys.executable, __file__, "--one", method, str(persistent)], capture_output=True, text=True,
                    check=True,
                )  # fmt: skip
                key = f"{method}{', persistent' * persistent}"
                seconds.setdefault(key, []).extend(json.loads(done.stdout)[1:])
    rows = [
        [name, f"{statistics.median(found):.3f}", f"{min(found):.3f}", f"{max(found):.3f}"]
        for name, found in seconds.items()
    ]
    print_table(["start method", "median s", "fastest", "slowest"], rows)
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), "seconds": seconds})


if __name__ == "__main__":
    main()
