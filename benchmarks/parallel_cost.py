"""What a step costs under FSDP, tensor parallelism, a pipeline and DP, beside the loop that one writes by hand.

``python benchmarks/parallel_cost.py --case fsdp`` starts two processes on this machine, which meet over Gloo. The model
has 10.8 million parameters, most of them in five blocks. The contestants take turns, a window of steps each, as in
``ddp_cost.py``; a figure is the median over neighbouring windows of its ratio to the hand-written loop, with the
quartiles. "The same once more" is the hand-written loop a second time, and shows what the machine adds by itself. The
last column compares the CPU time of the process instead of the time on the clock: other programs change it less.

The processes keep the memory that they have freed: by default, glibc gives large blocks back to the system, each time
with thousands of page faults, and how many a contestant has depends on which of them started first (its thread has the
first arena), not on what it does: the same loop took 2 % longer or shorter.

Before that, each contestant makes four steps under a dispatch mode: collectives, their bytes, and the bytes of live
storages after the third step, on one rank.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_cost import QUIET, Batch, Turns
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import spawn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

KEEP_MEMORY = {  # of glibc; other systems ignore it
    "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**26),
}  # fmt: skip
BATCH_SIZE = 32
MICROBATCHES = 4
BLOCKS = 5
BASELINE, AGAIN, OURS = "hand-written loop", "the same once more", "drivetrain"
RANKS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.head = nn.Linear(width, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(self.before, *self.blocks[:2]), nn.Sequential(*self.blocks[2:], self.head)]


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.0001)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def train(model: nn.Module, batches: Any) -> None:
    optimizer = make_optimizer(model)
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fsdp_by_hand(batches: Any, width: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model, mesh = Net(width), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, batches)


def tensor_by_hand(batches: Any, width: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Net(width), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    train(model, batches)


def pipeline_by_hand(batches: Any, width: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    model = Net(width).stages()[rank]
    optimizer = make_optimizer(model)
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    for x, y in batches:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()


def dp_by_hand(batches: Any, width: int) -> None:
    model = Net(width)
    optimizer = make_optimizer(model)
    for x, y in batches:
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        loss = torch.stack([F.mse_loss(model(each), target) for each, target in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- by the Trainer --------------------------------------------------------------------------------------------------


def by_trainer(case: str, batches: Any, width: int) -> None:
    import drivetrain as dt
    from drivetrain.strategies import ModelParallelStrategy, PipelineStrategy

    class Module(dt.LightningModule):
        tp_plan = {"net.blocks.*.first": "colwise", "net.blocks.*.second": "rowwise"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_pipeline(self, num_stages: int) -> Any:
            return self.net.stages(), F.mse_loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    strategy: Any = {
        "fsdp": lambda: "fsdp",
        "tensor": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS),
        "pipeline": lambda: PipelineStrategy(schedule="1f1b", num_microbatches=MICROBATCHES),
        "dp": lambda: "dp",
    }[case]()
    dt.Trainer(**{**QUIET, "strategy": strategy}, default_root_dir=tempfile.gettempdir()).fit(Module(), batches)


CASES: dict[str, Callable[[Any, int], None]] = {
    "fsdp": fsdp_by_hand, "tensor": tensor_by_hand, "pipeline": pipeline_by_hand, "dp": dp_by_hand,
}  # fmt: skip


def contestants(case: str) -> dict[str, Callable[[Any, int], None]]:
    return {BASELINE: CASES[case], AGAIN: CASES[case], OURS: partial(by_trainer, case)}


# ---- what does not depend on the machine -----------------------------------------------------------------------------


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield those of all tensors, of a DTensor that of its local tensor."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            yield from storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()


class Watch(TorchDispatchMode):
    """Counts collectives and their bytes, and knows which storages are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: Counter[str] = Counter()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in storages((args, kwargs, result)):
            self.storages[storage._cdata] = StorageWeakRef(storage)
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.exchanges["calls"] += 1
            self.exchanges["bytes"] += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return result

    def live_bytes(self) -> int:
        gc.collect()
        found = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.storages.values())
        return sum(each.nbytes() for each in found if each is not None)


class Counted:
    """Four batches; what the third step exchanges, and what is alive after it, is counted."""

    def __init__(self, batches: list[Batch], watch: Watch) -> None:
        self.batches, self.watch = batches[:4], watch
        self.found: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if index == 2:
                self.watch.exchanges.clear()
            elif index == 3:
                live = self.watch.live_bytes()
                self.found = {"calls": 0, "bytes": 0, **self.watch.exchanges, "live": live}
            yield batch


def counted(train: Callable[[Any, int], None], batches: list[Batch], width: int) -> dict[str, int]:
    with Watch() as watch:
        given = Counted(batches, watch)
        train(given, width)
    return given.found


# ---- measuring -------------------------------------------------------------------------------------------------------


def run_rank(
    rank: int, case: str, ranks: int, width: int, steps: int, windows: int, threads: int, port: int, results: Any
) -> None:
    """Run one process: each contestant in a thread of its own, one at a time, in the same order on all ranks."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), NODE_RANK="0",
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="bench",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank if case == "fsdp" else 0)  # of others, all ranks see the same
    batches = [
        (torch.randn(BATCH_SIZE, width, generator=generator), torch.randn(BATCH_SIZE, 1, generator=generator))
        for _ in range(max(steps, 4))
    ]
    there = contestants(case)
    found = {name: counted(train, batches, width) for name, train in there.items() if name != AGAIN}
    turns: dict[str, Turns] = {}
    cpu: dict[str, list[float]] = {name: [] for name in there}  # seconds of this process, of all its threads
    names = list(there)
    orders = [names[turn % len(names) :] + names[: turn % len(names)] for turn in range(windows)]
    for order in [names, *orders]:
        for name in order:
            dist.barrier()
            if name not in turns:  # in the first window each sets itself up
                turns[name] = Turns(batches[:steps], windows + 2, threading.Semaphore(0), threading.Semaphore(0))
                threading.Thread(target=there[name], args=(turns[name], width), daemon=True).start()
            begin = time.process_time()
            turns[name].mine.release()
            turns[name].over.acquire()
            cpu[name].append(time.process_time() - begin)
    results[rank] = {
        "counts": found,
        "seconds": {name: turn.seconds[1:] for name, turn in turns.items()},
        "cpu": {name: seconds[1:] for name, seconds in cpu.items()},
    }
    dist.barrier()
    os._exit(0)  # the threads wait for a last window, whose end is not measured


def report(case: str, found: Any, steps: int) -> None:
    rows, counts, seconds = [], found["counts"], found["seconds"]
    for name, mine in seconds.items():
        ratios, cpu = (
            [one / base for one, base in zip(each[name], each[BASELINE], strict=True)]
            for each in (seconds, found["cpu"])
        )
        low, _, high = statistics.quantiles(ratios, n=4)
        count = counts.get(name, counts[BASELINE])
        rows.append([
            name, f"{count['calls']}", f"{count['bytes'] / 2**20:.2f}", f"{count['live'] / 2**20:.1f}",
            f"{1000 * statistics.median(mine) / steps:.1f}", f"{1000 * min(mine) / steps:.1f}",
            f"{statistics.median(ratios):.3f}", f"{low:.3f}-{high:.3f}", f"{statistics.median(cpu):.3f}",
        ])  # fmt: skip
    print(f"\n{case}\n")
    header = ["loop", "collectives", "MiB", "live MiB", "ms per step", "fastest", "ratio", "quartiles", "CPU ratio"]
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--width", type=int, default=512, help="512 makes 10.5 million parameters")
    parser.add_argument("--steps", type=int, default=5, help="in a window")
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    os.environ.update(KEEP_MEMORY)  # the processes that start from here on read it
    everything: dict[str, Any] = {}
    for number, case in enumerate(arguments.case):
        ranks = 1 if case == "dp" else RANKS
        with torch.multiprocessing.Manager() as manager:
            results = manager.dict()
            port = 20_000 + (os.getpid() + 17 * number) % 10_000
            given = (case, ranks, arguments.width, arguments.steps, arguments.windows, arguments.threads, port, results)
            spawn(run_rank, given, ranks)
            everything[case] = dict(results[0])
        report(case, everything[case], arguments.steps)
    parameters = sum(each.numel() for each in Net(arguments.width).parameters())
    print(f"\n{parameters:,} parameters, batches of {BATCH_SIZE}")
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), "found": everything})


if __name__ == "__main__":
    main()
