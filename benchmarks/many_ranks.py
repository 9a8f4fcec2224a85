"""What one rank of 2 to 1,024 does, and what all of them ask of the job's store.

A process is one rank of a job in torch's fake process group, whose other ranks answer with what
this one sends: it shows seconds, and the bytes that the rank exchanges. The requests to the store are those of all
ranks: each is a thread that follows the real protocol on a store that counts. A request that is repeated until its
answer changes counts once. ``tests/budget/test_many_ranks.py`` checks what must not grow; times move with the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from growth import OURS, Batches, Model, as_rank, trainer
from report import print_table, versions, write_json
from torch.utils.data import DataLoader, Dataset

SIZES = [2, 8, 32, 128, 1_024]
ON_EACH = 8  # processes of a machine
BILLION = 10**9
STEPS = ("set-up", "agreement checks", "sampler", "log flush", "checkpoint")

# ---- one rank in the fake process group ------------------------------------------------------------------------------


class Exchanged:
    """Counts the bytes that this rank sends or receives in torch's collectives, whichever are more."""

    def __init__(self) -> None:
        self.bytes = 0
        for name in ("all_gather", "all_reduce", "broadcast", "reduce"):
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, second: Any = None, *args: Any, **options: Any) -> Any:
            self.bytes += sum(each.nbytes for each in (first if name == "all_gather" else [first]))
            return collective(first, second, *args, **options) if second is not None else collective(first, **options)

        return call


class Numbers(Dataset[int]):
    """A thousand million samples that take no memory."""

    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, index: int) -> int:
        return index


def one_rank(rank: int, world_size: int) -> dict[str, float]:
    """Seconds, bytes and our own calls of each step on ``rank``: 0, or one that writes a file for its machine.

    DDP's reduction of gradients is left out, because torch's fake of it fails. A save in which each machine has a file
    needs a store and a group for the machine, in which the other ranks again answer with what this one sends.
    """
    import torch._dynamo
    import torch.testing._internal.distributed.fake_pg

    from drivetrain.data.samplers import share
    from drivetrain.strategies import DDPStrategy, TorchGroup, agreement, collectives, peers, rank_files

    on_each = min(ON_EACH, world_size)
    as_rank(rank, world_size, 20_000 + os.getpid() % 10_000)
    os.environ.update(LOCAL_RANK=str(rank % on_each), GROUP_RANK=str(rank // on_each))
    found: dict[str, float] = {}
    exchanged = Exchanged()

    @contextmanager
    def measured(step: str) -> Iterator[None]:
        begin, bytes_before = time.perf_counter(), exchanged.bytes
        yield
        found[f"{step} s"] = time.perf_counter() - begin
        found[f"{step} bytes"] = exchanged.bytes - bytes_before

    def of_rank_zero(_: peers.Peers, obj: Any, src: int = 0) -> Any:
        """The fake group brings no data to another rank than the one that sends: what this rank has is the answer."""
        exchanged.bytes += len(peers.dumped(obj)[0])
        return obj

    def unreduced(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def of_machine(group: TorchGroup, ranks: Sequence[int]) -> Any:
        def gather_objects(obj: Any) -> list[Any]:
            data, _ = peers.dumped(obj)
            exchanged.bytes += len(data) * len(ranks)
            return [peers.loaded(data, None) for _ in ranks]

        return SimpleNamespace(ranks=ranks, gather_objects=gather_objects)

    def collected(strategy: Any, path: Any, number: str, own: Any, writers: Sequence[int]) -> list[Any]:
        """Rank 0 collects these at the store: see :func:`protocols`."""
        names = {writer: f"{path.name}.{number}.rank{writer}" for writer in writers if rank == 0}
        return [{"name": name, "ranks": [*range(writer, writer + on_each)], "size": 10**5, "crc32": 2**31}
                for writer, name in names.items()]  # fmt: skip

    if rank:
        collectives.broadcast = of_rank_zero  # type: ignore[assignment]
    TorchGroup.can_divide_on_host = True  # type: ignore[assignment, method-assign]
    TorchGroup.new = of_machine  # type: ignore[method-assign]
    rank_files._collected = collected

    strategy = DDPStrategy(process_group_backend="fake", ddp_comm_hook=unreduced)
    one = trainer(devices=on_each, num_nodes=world_size // on_each, strategy=strategy, log_every_n_steps=10)
    inside: dict[int, Any] = {}

    def enter(step: str) -> Callable[[], None]:
        def begin() -> None:
            inside[0] = measured(step)
            inside[0].__enter__()

        return begin

    def leave() -> None:
        inside[0].__exit__(None, None, None)

    enter("set-up")()
    one.fit(Model(keys=10, at={0: leave, 9: enter("log flush"), 10: leave}), Batches(12))
    facts = agreement.Facts({"options": "x" * 100}, {f"parameter {index}": "float32" for index in range(100)}, "1")
    with measured("agreement checks"):
        agreement.compare(strategy.world, strategy.data, facts)
    with measured("sampler"):
        batches: Any = share(DataLoader(Numbers(), 8), rank, world_size, lambda value: value)
        drawn = [*islice(batches.batch_sampler, 50)]
    assert [len(batch) for batch in drawn] == [8] * 50
    with tempfile.TemporaryDirectory() as folder:
        with measured("checkpoint"):
            one.save_checkpoint(Path(folder) / "one.ckpt")
        found["bytes of the file"] = sum(path.stat().st_size for path in Path(folder).iterdir())
    calls: Counter[bool] = Counter()
    names, values = [f"key{index}" for index in range(10)], torch.ones(20, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(lambda frame, event, _: calls.update([event == "call" and OURS in frame.f_code.co_filename]))
        strategy.world.reduce_keyed(names, values, values[:0])
        agreement.compare(strategy.world, strategy.data, facts)
        one.save_checkpoint(Path(folder) / "two.ckpt")
        sys.setprofile(None)
    found["calls of a flush, a check and a save"] = calls[True]
    found["together s"] = sum(found[f"{step} s"] for step in STEPS)
    return found


def writer_of(world_size: int) -> int:
    """Return the last rank that writes a file."""
    return max(1, world_size - ON_EACH)


def in_own_process(rank: int, world_size: int) -> dict[str, float]:
    """:func:`one_rank` in a process of its own: a process joins one job."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", str(rank), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


# ---- all ranks at a store that counts --------------------------------------------------------------------------------


class Shared:
    """What the ranks' views of one store have in common."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.arrived: dict[str, threading.Event] = {}

    def event(self, key: str) -> threading.Event:
        with self.lock:
            return self.arrived.setdefault(key, threading.Event())


class CountingStore:
    """One rank's connection to a store in memory, with the methods of torch's stores; it counts requests and bytes."""

    def __init__(self, shared: Shared) -> None:
        self.shared, self.requests, self.bytes = shared, 0, 0
        self._asked: tuple[Any, ...] = ()

    def clone(self) -> CountingStore:
        return self

    def _count(self, *sent: Any, repeats: bool = False) -> None:
        if repeats and (sent == self._asked or sent == ("drivetrain/failed",)):
            return
        self._asked = sent if repeats else ()
        self.requests += 1
        self.bytes += sum(len(str(each)) for each in sent)

    def _put(self, key: str, value: str | bytes) -> bytes:
        self.shared.values[key] = value.encode() if isinstance(value, str) else value
        self.shared.arrived.setdefault(key, threading.Event()).set()
        return self.shared.values[key]

    def set(self, key: str, value: str | bytes) -> None:
        self._count(key, value)
        with self.shared.lock:
            self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        self._count(key, amount)
        with self.shared.lock:
            return int(self._put(key, str(int(self.shared.values.get(key, b"0")) + amount)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count(key, expected, value)
        with self.shared.lock:
            there = self.shared.values.get(key, b"")
            return self._put(key, value) if there == expected.encode() else there

    def get(self, key: str) -> bytes:
        assert self.shared.event(key).wait(60), key
        value = self.shared.values[key]
        self._count(key, value.decode())
        return value

    def check(self, keys: Sequence[str]) -> bool:
        self._count(*keys, repeats=True)
        return all(key in self.shared.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count(*keys, repeats=True)
        for key in keys:
            if not self.shared.event(key).wait(timeout.total_seconds()):
                raise RuntimeError(f"{key} has not come")

    def delete_key(self, key: str) -> None:
        self._count(key)
        with self.shared.lock:
            self.shared.values.pop(key, None)
            self.shared.arrived.pop(key, None)


def protocols(world_size: int) -> dict[str, list[tuple[int, int]]]:
    """Requests and bytes of each rank, for each thing that the ranks do together at the store."""
    from drivetrain.loops.stop import Stop
    from drivetrain.strategies.group import TorchGroup
    from drivetrain.strategies.joint_save import JointSave, _decided
    from drivetrain.strategies.meeting import Meeting
    from drivetrain.strategies.waiting import _Here
    from drivetrain.trainer import votes

    _decided.clear()  # keys of other saves of this process, which the next one removes
    _Here.leaves = math.inf  # a run of this process that has failed no longer hurries
    on_each = min(ON_EACH, world_size)
    writers = [max(1, first) for first in range(0, world_size, on_each)]

    def meeting(store: CountingStore, rank: int) -> None:
        place = Meeting("127.0.0.1", 1, rank, world_size, timedelta(seconds=60))
        for key in ("drivetrain/meeting", "drivetrain/connected"):
            place.wait_for_all(store, key)

    def phase(store: CountingStore, rank: int) -> None:
        world: Any = SimpleNamespace(rank=rank, size=world_size, barrier=lambda name: None)
        with votes._voting(store, world, "drivetrain/vote/1", "setup", None):  # type: ignore[arg-type]
            pass

    def new_group(store: CountingStore, rank: int) -> None:
        first = rank - rank % on_each
        machine: Any = SimpleNamespace(rank=rank)
        with_store.current.store = store
        TorchGroup._check_other_groups(machine, list(range(first, first + on_each)))

    def save(store: CountingStore, rank: int) -> None:
        joint = JointSave(SimpleNamespace(rank=rank, ranks=range(world_size)), "a.ckpt", "01234567", store, writers)  # type: ignore[arg-type]
        entry = {"name": f"a.ckpt.01234567.rank{rank}", "ranks": list(range(on_each)), "size": 50_000, "crc32": 2**31}
        if rank in writers:
            joint.exchange(entry, None)
        elif not rank:
            assert len(joint.exchange({}, None)) == len(writers)
        joint.conclude(None)

    def stop(store: CountingStore, rank: int) -> None:
        one: Any = SimpleNamespace(_store=store, _size=world_size, _key="drivetrain/stop/{}".format)
        Stop._write_number(one, 100 + rank % 3)
        store.wait([one._key("last")])
        store.get(one._key("last"))

    with_store = _StoreOfThread()
    everything = {
        "the processes meet": meeting, "a vote after a phase": phase, "a group of each machine": new_group,
        "a save in the background": save, "a stop": stop,
    }  # fmt: skip
    with with_store:
        return {what: _in_threads(world_size, function) for what, function in everything.items()}


class _StoreOfThread:
    """Where torch looks for the job's store, a thread finds its own view."""

    def __init__(self) -> None:
        self.current = threading.local()

    def __enter__(self) -> None:
        from drivetrain.base import torch_private

        self._before = {name: getattr(torch_private, name) for name in ("default_store", "world")}
        vars(torch_private).update(default_store=lambda: self.current.store, world=SimpleNamespace(pg_names={}))

    def __exit__(self, *exception: object) -> None:
        from drivetrain.base import torch_private

        vars(torch_private).update(self._before)


def _in_threads(world_size: int, function: Callable[[CountingStore, int], None]) -> list[tuple[int, int]]:
    shared, failed = Shared(), list[BaseException]()
    views = [CountingStore(shared) for _ in range(world_size)]

    def run(rank: int) -> None:
        try:
            function(views[rank], rank)
        except BaseException as error:
            failed.append(error)

    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [(view.requests, view.bytes) for view in views]


# ---- the tables ------------------------------------------------------------------------------------------------------


def _row(what: str, values: Sequence[float]) -> list[str]:
    growth = values[-1] / values[0] if values[0] else float(values[-1] > 0)
    shown = [f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3f}" for value in values]
    return [what, *shown, f"{growth:,.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.one:
        print(f"\n{json.dumps(one_rank(*arguments.one))}")
        return
    header = ["", *(f"{size:,}" for size in arguments.sizes), "growth"]
    found = {
        "rank 0": [in_own_process(0, size) for size in arguments.sizes],
        "a rank that writes for its machine": [in_own_process(writer_of(size), size) for size in arguments.sizes],
    }
    for rank, rows in found.items():
        print(f"\n{rank[0].upper()}{rank[1:]}, by the number of ranks:\n")
        print_table(header, [_row(name, [row[name] for row in rows]) for name in rows[0]])
    at_store = [protocols(size) for size in arguments.sizes]
    print("\nAt the store:\n")
    table = []
    for what in at_store[0]:
        for index, unit in enumerate(("requests", "bytes")):
            each = [[numbers[index] for numbers in one[what]] for one in at_store]
            table += [
                _row(f"{what}: {unit} of rank 0", [numbers[0] for numbers in each]),
                _row(f"{what}: {unit}, most of a rank", [max(numbers) for numbers in each]),
                _row(f"{what}: {unit} in all", [sum(numbers) for numbers in each]),
            ]
    print_table(header, table)
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "ranks": found, "store": at_store})


if __name__ == "__main__":
    main()
