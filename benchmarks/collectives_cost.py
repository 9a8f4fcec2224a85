"""What a collective on a tensor costs on two processes: checked first, bare, and torch's own.

``python benchmarks/collectives_cost.py`` starts two processes on this machine, which meet over Gloo. Each collective is
called in stretches, by torch itself, unchecked and checked in turn. A time is the median over the stretches, and the
fastest of them; the ratio, of checked to unchecked, is the median over neighbouring stretches. A check is one small
exchange before the collective, so what it costs does not depend on the tensor's size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import print_table, versions, write_json
from torch import Tensor
from torch.multiprocessing import spawn

RANKS = 2


def torchs_gather(tensor: Tensor) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(RANKS)], tensor)


def torchs_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor.clone())


def stretch(call: Callable[[Tensor], Any], tensor: Tensor, calls: int) -> float:
    """Microseconds of one call."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call(tensor)
    return 1e6 * (time.perf_counter() - begin) / calls


def run_rank(rank: int, sizes: list[int], calls: int, stretches: int, port: int, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from drivetrain.strategies import TorchGroup
    from drivetrain.strategies.peers import Checks

    checked, bare = TorchGroup(checks=Checks(True)), TorchGroup(checks=Checks(False))
    contestants: dict[str, dict[str, Callable[[Tensor], Any]]] = {
        "all_gather": {"torch": torchs_gather, "bare": bare.all_gather, "checked": checked.all_gather},
        "reduce": {
            "torch": torchs_reduce,
            "bare": lambda tensor: bare.all_reduce(tensor, "sum"),
            "checked": lambda tensor: checked.all_reduce(tensor, "sum"),
        },
    }
    found: dict[str, list[float]] = {}
    for size in sizes:
        tensor = torch.randn(size)
        for _ in range(stretches):
            for collective, ways in contestants.items():
                for way, call in ways.items():
                    found.setdefault(f"{collective} {size} {way}", []).append(stretch(call, tensor, calls))
    results[rank] = found
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 1_000, 100_000], help="elements, float32")
    parser.add_argument("--calls", type=int, default=50, help="in a stretch")
    parser.add_argument("--stretches", type=int, default=40)
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        port = 20_000 + os.getpid() % 10_000
        spawn(run_rank, (arguments.sizes, arguments.calls, arguments.stretches, port, results), RANKS)
        found: dict[str, list[float]] = dict(results[0])
    rows = []
    for collective in ("all_gather", "reduce"):
        for size in arguments.sizes:
            times = [found[f"{collective} {size} {way}"] for way in ("torch", "bare", "checked")]
            bare, checked = times[1:]
            ratio = statistics.median(one / other for one, other in zip(checked, bare, strict=True))
            each = [f"{statistics.median(way):.0f}" for way in times] + [f"{min(way):.0f}" for way in times]
            rows.append([collective, str(size), *each, f"{ratio:.1f}"])
    ways = ["torch", "bare", "checked"]
    print_table(
        ["collective", "elements", *(f"{way} us" for way in ways), *(f"{way} fastest" for way in ways), "ratio"], rows
    )
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), "us": found})


if __name__ == "__main__":
    main()
