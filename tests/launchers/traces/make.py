"""Writes the traces beside this file: of ranks that hang in each kind of fault. Run it where torch's format changes.

``python tests/launchers/traces/make.py`` needs some half a minute, and two or three processes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.launchers import flight

HERE = Path(__file__).parent
ONES = torch.ones(3)


def wait() -> None:
    time.sleep(60)


def all_reduce(size: int = 3, group: Any = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


# What each rank does in the end, given its groups of all ranks and of the first two; None: it has died.
CASES: dict[str, list[Callable[[Any, Any], Any] | None]] = {
    "dead": [lambda *_: all_reduce(), None],
    "behind": [lambda *_: all_reduce(), lambda *_: wait()],
    "two_of_three_behind": [lambda *_: all_reduce(), lambda *_: wait(), lambda *_: wait()],
    "other_collective": [lambda *_: all_reduce(), lambda *_: dist.barrier()],
    "other_shapes": [lambda *_: all_reduce(3), lambda *_: (time.sleep(2), all_reduce(4))],
    "crossed_groups": [lambda every, _: all_reduce(group=every), lambda *_: all_reduce()],
    "group_of_two": [lambda _, two: all_reduce(group=two), lambda *_: wait(), lambda *_: wait()],
    "receive": [lambda *_: dist.recv(ONES, 1), lambda *_: wait()],
    "broadcast": [
        lambda *_: (dist.broadcast(ONES, 0), all_reduce()),
        lambda *_: dist.broadcast(ONES, 0),
        lambda *_: wait(),
    ],
}


def run(case: str, rank: int, size: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    every, two = dist.new_group(list(range(size)), group_desc="every"), dist.new_group([0, 1])
    dist.all_reduce(ONES)
    act = CASES[case][rank]
    if act is None:
        time.sleep(2)
        os._exit(0)

    def dump() -> None:
        time.sleep(2.5 if rank and case == "other_shapes" else 1.5)
        (folder / f"{case}.{rank}").write_bytes(flight.taken())
        time.sleep(3)
        os._exit(0)

    threading.Thread(target=dump).start()
    with contextlib.suppress(RuntimeError):  # the other rank has ended
        act(every, two)
    wait()


if __name__ == "__main__":
    for case, ranks in CASES.items():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = []
        for rank in range(len(ranks)):
            if (child := os.fork()) == 0:
                run(case, rank, len(ranks), port, HERE)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        traces = {}
        for rank in range(len(ranks)):
            part = HERE / f"{case}.{rank}"
            traces[rank] = json.loads(part.read_text()) if part.exists() else None
            part.unlink(missing_ok=True)
        (HERE / f"{case}.json").write_text(json.dumps(traces, indent=1) + "\n")
