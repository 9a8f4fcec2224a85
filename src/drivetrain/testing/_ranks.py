"""Run the tests of a conformance suite in processes that are ranks of a job."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from drivetrain.base.torch_private import DYNAMO
from drivetrain.cli.class_files import module_of
from drivetrain.clusters.local import free_port

_PRELOADED = ["torch", DYNAMO, "drivetrain.trainer.trainer", "pytest"]
_GRACE_S = 5.0  # seconds that the other ranks have to finish after a rank has failed


class Ranks:
    """Runs a suite's tests in one process per device, with torchrun's environment variables. With one device, the tests
    run in this process.

    The processes start with the first test. After a test has failed, the next test starts new processes.

    Args:
        suite: the class with the tests. The processes import this class, or call the class's function ``rebuild`` to
            create it.
        size: the number of processes.
        timeout_s: seconds for one test.
    """

    def __init__(self, suite: type, size: int, timeout_s: float = 100.0) -> None:
        self._suite, self._size, self._timeout_s = suite, size, timeout_s
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, row: str, folder: Path) -> None:
        """Run the test of this name on every rank.

        Raises:
            AssertionError: the test failed on a rank, a process died, or the test took too long.
            Skipped: the lowest rank has skipped the test. ``Skipped`` is an exception of pytest.
        """
        if self._size == 1:
            instance = self._suite()
            getattr(self._suite, row).row(instance, folder)
            return
        if not self._processes:
            self._start()
        try:
            for each in self._connections:
                each.send((row, str(folder)))
            outcomes = self._collect()
        except BaseException:
            self.close()
            raise
        failed = {rank: text for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"}
        if failed:
            self.close()
            raise AssertionError("\n".join(f"---- rank {rank} ----\n{text}" for rank, text in failed.items()))
        for outcome, text in outcomes:
            if outcome == "skipped":
                import pytest

                pytest.skip(text)

    def _start(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # all ranks are forked from a server process that has already imported these modules
            context.set_forkserver_preload(_PRELOADED)
        port = free_port()
        file = getattr(sys.modules[self._suite.__module__], "__file__", None)
        by_name = functools.partial(_found, self._suite.__module__, file, self._suite.__qualname__)
        find: Callable[[], Any] = getattr(self._suite, "rebuild", by_name)
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            environ = _environ(rank, self._size, port)
            process = context.Process(target=_serve, args=(theirs, environ, find), daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self) -> list[tuple[str, str]]:
        outcomes: dict[int, tuple[str, str]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(outcomes) < self._size:
            waiting = [rank for rank in range(self._size) if rank not in outcomes]
            connections = [self._connections[rank] for rank in waiting]
            ready = connection.wait(connections, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = "it did not end in time, perhaps because it waits for another rank"
                outcomes |= {rank: ("failed", late) for rank in waiting}
            for rank in waiting:
                if self._connections[rank] not in ready:
                    continue
                try:
                    outcomes[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    outcomes[rank] = ("failed", "the process died")
                if outcomes[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [outcomes[rank] for rank in range(self._size)]

    def close(self) -> None:
        """End the processes."""
        for each in self._connections:
            each.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _environ(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set."""
    ranks = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
    sizes = {name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
    return {
        **ranks, **sizes, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"conformance-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def _serve(jobs: Connection, environ: dict[str, str], find: Callable[[], Any]) -> None:
    """Run each requested test until the connection is closed. Called in a started process."""
    os.environ.update(environ)
    import pytest
    import torch

    torch.set_num_threads(1)
    suite: Any = None
    while True:
        try:
            row, folder = jobs.recv()
        except EOFError:
            return
        try:
            suite = suite or find()
            getattr(suite, row).row(suite(), Path(folder))
            outcome = ("passed", "")
        except pytest.skip.Exception as skipped:
            outcome = ("skipped", str(skipped))
        except BaseException:  # pytest raises subclasses of BaseException
            outcome = ("failed", traceback.format_exc())
        jobs.send(outcome)


def _found(module: str, file: str | None, name: str) -> Any:
    """Return the suite. If no module has the name ``module``, which pytest may have chosen, import ``file``."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        if file is None:
            raise
        found = module_of(file)
    for part in name.split("."):
        found = getattr(found, part)
    return found
