"""How long each kernel of an optimizer takes on the host, relative to torch's loop over the parameters.

``drivetrain.loops.kernels`` chooses by this table. CPU time of one thread; blocks of the two kernels in turn, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from report import print_table, versions, write_json
from torch import nn, optim

COUNTS, SIZES = (4, 8, 12, 30, 100, 300), (64, 512, 2048, 8192, 32768)
MOST_NUMBERS = 4_000_000

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.01}),
    "SGD, momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {}),
    "Adagrad": (optim.Adagrad, {}),
    "RMSprop": (optim.RMSprop, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "Rprop": (optim.Rprop, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "ASGD": (optim.ASGD, {}),
}


def optimizer_of(name: str, count: int, size: int, kernel: str | None) -> optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    trained = [nn.Parameter(torch.randn(size)) for _ in range(count)]
    for each in trained:
        each.grad = torch.randn(size)
    made: optim.Optimizer = kind(trained, **options, **({} if kernel is None else {kernel: True}))
    return made


def ratio(name: str, count: int, size: int, kernel: str, blocks: int) -> float | None:
    """Return the time of a step with ``kernel`` relative to the loop; ``None``: the optimizer has no such kernel."""
    try:
        ways = [optimizer_of(name, count, size, each) for each in (None, kernel)]
    except TypeError:
        return None
    steps = max(3, int(1e6 / (count * (size + 3000))))
    return statistics.median(_block(ways[1], steps) / _block(ways[0], steps) for _ in range(blocks))


def _block(optimizer: optim.Optimizer, steps: int) -> float:
    optimizer.step()
    began = time.thread_time()
    for _ in range(steps):
        optimizer.step()
    return time.thread_time() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kernel in ("foreach", "fused"):
        for name in given.optimizers:
            rows = []
            for count in COUNTS:
                sizes = [size if count * size <= MOST_NUMBERS else None for size in SIZES]
                ratios = [None if each is None else ratio(name, count, each, kernel, given.blocks) for each in sizes]
                found[f"{kernel} {name} {count}"] = ratios
                rows.append([f"{count}", *("" if each is None else f"{each:.2f}" for each in ratios)])
            if any(cell for row in rows for cell in row[1:]):
                print(f"\n{name}, {kernel}: parameters, and numbers in each\n")
                print_table(["", *map(str, SIZES)], rows)
    if given.json is not None:
        write_json(given.json, {"versions": versions(), "ratios": found})


if __name__ == "__main__":
    main()
