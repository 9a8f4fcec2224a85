"""Compare a plan of one of the small programs with a real run of it on the processors of this machine.

Both run in copies of this process, which has imported torch, one for each rank.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the copies need it, and importing it takes seconds
from tests.distributed.pool import free_port
from tests.forecast import real

from drivetrain.forecast import child

HERE = Path(__file__).parent
CONSTANT = 24_000
"""Bytes that a real run allocates beside the program: states of random generators, which are always on the host."""


def copied(function: Callable[[], Any], log: Path, **environ: str) -> int:
    """Run ``function`` in a copy of this process, whose number is returned."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.environ.update(environ)
        torch.set_num_threads(1)
        with open(log, "ab", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def planned(folder: Path, *words: str, devices: int = 1, rank: int = 0, **more: Any) -> Any:
    """Return what the plan measured for ``programs.py`` with ``words``."""
    return whole_plan(folder, *words, devices=devices, rank=rank, **more)["base"]


def whole_plan(folder: Path, *words: str, devices: int = 1, rank: int = 0, **more: Any) -> Any:
    """Return all results of the plan of ``programs.py`` with ``words``: with ``tries=True`` those of changes, too."""
    asked = {
        "devices": devices, "per_node": devices, "rank": rank, "on_host": True, "memory": None, "tries": False,
        "result": str(folder / "result"), **more,
    }  # fmt: skip

    def plan() -> None:
        sys.argv = ["plan", str(HERE / "programs.py"), *words]
        child.main()

    os.waitpid(copied(plan, folder / "log", DRIVETRAIN_PLAN=json.dumps(asked)), 0)
    assert (folder / "result").exists(), (folder / "log").read_text()
    found = pickle.loads((folder / "result").read_bytes())
    assert "base" in found, found["failed"] + (folder / "log").read_text()
    return found


def ran(folder: Path, *words: str, devices: int = 1, walks: bool = False) -> dict[str, Any]:
    """Return what a real run of ``programs.py`` with ``words`` took on rank 0."""
    job = {}
    if devices > 1:
        job = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    copies = [
        copied(
            lambda: real.main(str(folder / "real"), words[0], list(words[1:]), walks), folder / f"log{rank}", **job,
            **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if job else {}),
        )
        for rank in range(devices)
    ]  # fmt: skip
    running = {os.pidfd_open(each): each for each in copies}
    while running:
        for ended in select.select(list(running), [], [])[0]:
            os.close(ended)
            if os.waitpid(running.pop(ended), 0)[1]:  # the other ranks would wait for this rank
                for other in running.values():
                    os.kill(other, signal.SIGKILL)
    assert (folder / "real.0").exists(), "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("log?")))
    found: dict[str, Any] = json.loads((folder / "real.0").read_text())
    assert found["peak"], "the run had no third window"
    return found
