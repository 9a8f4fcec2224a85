"""Processes in which tests of several processes run: started once, used by every test of a session."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

SIZE = 4  # processes
PRELOADED = [
    "torch",
    "torch._dynamo",
    "drivetrain.trainer.trainer",
    "pytest",
]  # optimizers import dynamo when they are made
GRACE = 10.0  # seconds that the other ranks get after one has failed
LAST_WORDS = 5.0  # seconds for a process to write its stacks and die
LEAVE = b"leave"  # to a rank that waits with its group for the others; see worker.py
PORTS = range(20_000, 32_000)  # below what systems hand out for outgoing connections


class RankError(Exception):
    """What happened in the ranks of a job, as text; the cause of what the test sees."""


class JobError(AssertionError):
    """A job did not end: a rank died, or ran over its time."""


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection
    dump: Path


class Pool:
    """Up to four processes that run a test's function as the ranks of a job; see :meth:`run`."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._port = random.SystemRandom().choice(PORTS)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        group: bool = True,
        timeout: float = 60.0,
        environ: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function(*args)`` in ``world_size`` processes, each with the environment of a job of torchrun.

        Args:
            function: a function at the top of a test file, or a static method of a class there.
            args: what can be pickled; every rank gets its own copy.
            world_size: 1 to 4.
            group: whether a process group (gloo) exists while the function runs; without, the function makes its own.
                It is destroyed afterwards in either case.
            timeout: seconds for the job.
            environ: further environment variables.

        Returns:
            What the calls returned, in the order of ranks.

        Raises:
            JobError: a rank died or ran over its time; the message holds its stacks. The processes are replaced.
            Exception: what the first rank to fail raised; its cause holds the tracebacks of all that failed.
        """
        if not 1 <= world_size <= SIZE:
            raise ValueError(f"world_size={world_size}: the pool has {SIZE} processes. Write 1 to {SIZE}.")
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__}: processes find it by its name. Write it at the file's top.")
        jobs = list(self._jobs(function, args, world_size, group, environ or {}))
        self._start()
        workers = self._workers[:world_size]
        try:
            for worker, job in zip(workers, jobs, strict=True):
                worker.connection.send_bytes(pickle.dumps(job))
            outcomes = self._collect(workers, timeout)
        except BaseException:
            self.kill()  # a process may still be at work
            raise
        _raise_first(outcomes)
        return [torch.load(io.BytesIO(outcome["value"]), weights_only=False) for outcome in outcomes]

    def _jobs(
        self, function: Callable[..., Any], args: Any, world_size: int, group: bool, environ: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        port, packed = self._free_port(), io.BytesIO()
        torch.save(args, packed)  # plain pickle cannot do this for every type of tensor
        for rank in range(world_size):
            yield {
                "module": function.__module__,
                "function": function.__qualname__,
                "names": _suite_modules(),
                "args": packed.getvalue(),
                "group": group,
                "environ": {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
                    "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                    "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": str(world_size), "ROLE_NAME": "default",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"test-{port}",
                    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1",
                    "PL_TRAINER_STALL_TIMEOUT_S": "None",  # no process that watches each of these short jobs
                    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
                    **environ,
                },
            }  # fmt: skip

    def _free_port(self) -> int:
        """The next free port; no port comes twice in a row, so no job meets the last one's."""
        self._port = free_port(self._port)
        return self._port

    def _collect(self, workers: list[Worker], timeout: float) -> list[dict[str, Any]]:
        outcomes: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        overdue = f"the job ran longer than {timeout:g} s"
        done: set[int] = set()  # ranks that wait with their group for the others
        while len(outcomes) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():  # all at once: each would see that another is gone
                    _ask_for_stacks(workers[rank].process)
                for rank in waiting.values():
                    outcomes[rank] = {"text": f"{overdue}; it was here:\n{_last_words(workers[rank])}", "dead": True}
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    message = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    message = {"text": f"the process died:\n{_last_words(workers[rank])}", "dead": True}
                if "done" in message:
                    done.add(rank)
                    continue
                outcomes[rank] = message
                if "value" not in outcomes[rank] and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    overdue = f"rank {rank} had failed {GRACE:g} s before"
            if done and len(done | set(outcomes)) == len(workers):
                for rank in done - set(outcomes):
                    workers[rank].connection.send_bytes(LEAVE)
                done.clear()
        if any("dead" in outcome for outcome in outcomes.values()):
            self.kill()
        return [outcomes[rank] for rank in range(len(workers))]

    @contextmanager
    def fresh(self) -> Iterator[Pool]:
        """Other processes, which end with the block: for jobs whose traces cannot be undone, such as a new device."""
        pool = Pool()
        try:
            yield pool
        finally:
            pool.close()

    # ---- the processes -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.kill()
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-pool-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with _environ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}):
            multiprocessing.forkserver.ensure_running()
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            dump = Path(self._folder.name) / f"rank-{rank}.txt"
            program, inputs = str(Path(__file__).with_name("worker.py")), {"connection": theirs, "dump": str(dump)}
            process = context.Process(target=runpy.run_path, args=(program, inputs, "worker"), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, dump))

    def close(self) -> None:
        """Let the processes end; they start again when somebody runs a job."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(LAST_WORDS)
        self.kill()

    def kill(self) -> None:
        """End the processes, and what they have started, whatever they are doing."""
        for worker in self._workers:
            worker.connection.close()
            _kill(worker.process)
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def free_port(last: int | None = None) -> int:
    """The next port after ``last`` that nobody listens on; systems hand out none of these for outgoing connections."""
    port = random.SystemRandom().choice(PORTS) if last is None else last
    for _ in PORTS:
        port = port + 1 if port + 1 in PORTS else PORTS.start
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def _suite_modules() -> dict[str, str]:
    """Name and file of every module that pytest has loaded from the suite."""
    tests = str(Path(__file__).parent.parent) + os.sep
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: file for name, file in files.items() if file and file.startswith(tests)}


def _ask_for_stacks(process: BaseProcess) -> None:
    """Let the process write where it is, with its fault handler, and die."""
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)


def _last_words(worker: Worker) -> str:
    """Every thread's stack of a process that hangs or has died, and how it ended; it is dead afterwards."""
    worker.process.join(LAST_WORDS)
    _kill(worker.process)
    return f"{worker.dump.read_text()}\n(exit code {worker.process.exitcode})"


def _kill(process: BaseProcess) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the process leads a group of its own
    except ProcessLookupError:
        process.kill()
    process.join()


def _raise_first(outcomes: list[dict[str, Any]]) -> None:
    """Raise what happened first, if anything did."""
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if "value" not in outcome}
    if not failed:
        return
    text = "\n".join(f"---- rank {rank} of {len(outcomes)} ----\n{outcome['text']}" for rank, outcome in failed.items())
    raised = [outcome for outcome in failed.values() if "when" in outcome]
    first = min(raised, key=lambda outcome: outcome["when"]) if raised else None
    error = pickle.loads(first["error"]) if first is not None and first["error"] is not None else None
    if error is None or isinstance(error, KeyboardInterrupt):  # which would end the session
        raise JobError(f"\n{text}")
    raise error from RankError(f"\n{text}")


@contextmanager
def _environ(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_shared = Pool()


def shared() -> Pool:
    """The one pool that all tests of a pytest run share."""
    return _shared
