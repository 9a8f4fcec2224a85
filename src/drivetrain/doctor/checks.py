"""The types of a check's results, and the processes in which checks run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.base.registry import load
from drivetrain.errors import text_of

WRONG, NOTE = "wrong", "note"
"""Severities. WRONG: something fails or computes wrong numbers. NOTE: some programs will have a problem."""


@dataclass(frozen=True)
class Finding:
    """A problem that a check has found.

    Attributes:
        what: what was observed, with the value.
        so_what: what this means for a training.
        write: the cure: code to write, a value to set or a command to run.
        severity: :data:`WRONG` or :data:`NOTE`.
    """

    what: str
    so_what: str
    write: str
    severity: str = WRONG


Items = Iterator[Finding | str]
"""The items that a check yields: findings, and facts as text."""


class Check(NamedTuple):
    """One group of checks.

    Attributes:
        name: the name on the command line.
        function: where the function is, as ``"module:name"``. It returns :data:`Items`. With several ranks, each
            process calls it with its rank and a folder that all ranks share.
        seconds: the time limit.
        uses_torch: whether the check needs torch. Its process is then forked from one that has imported torch.
        ranks: the number of processes.
    """

    name: str
    function: str
    seconds: float
    uses_torch: bool = False
    ranks: int = 1


@dataclass
class Result:
    """The result of a check.

    Attributes:
        name: the check's name.
        facts: the facts as texts, in the order of the check.
        findings: the findings, in the order of the check.
        seconds: the duration of the check.
    """

    name: str
    facts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


def run(check: Check) -> Result:
    """Run a check in new processes, and kill them at the check's time limit.

    An exception, a killed process or an exceeded time limit becomes a finding.
    """
    result, started = Result(check.name), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drivetrain-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            for item in _items(check, folder, started + check.seconds):
                kept: list[Any] = result.facts if isinstance(item, str) else result.findings
                if item not in kept:  # several ranks may report the same finding
                    kept.append(item)
        except Exception as error:  # for example, the system allows no more processes or pipes
            result.findings.append(_failed(check.name, f"cannot start: {type(error).__name__}: {text_of(error)}"))
    result.seconds = time.monotonic() - started
    return result


def _items(check: Check, folder: str, deadline: float) -> Items:
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if check.uses_torch and has_server else "spawn")
    if check.uses_torch and has_server:
        # one process imports torch for all checks, and never uses a device
        context.set_forkserver_preload(["torch"])
    processes: dict[Connection, BaseProcess] = {}
    try:
        for rank in range(check.ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(check, rank, folder, sender), daemon=True)
            with _only_here():
                process.start()
            sender.close()
            processes[receiver] = process
        running = dict(processes)
        while running:
            ready = wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready:
                yield _failed(check.name, f"did not end within {check.seconds:g} s")
                return
            for receiver in (each for each in running.copy() if each in ready):
                try:
                    item = receiver.recv()
                except EOFError:
                    item = None
                    yield _failed(check.name, _last_words(running[receiver], folder))
                if item is None:
                    del running[receiver]
                else:
                    yield item
    finally:
        for process in processes.values():
            process.kill()
            process.join(1)


@contextmanager
def _only_here() -> Iterator[None]:
    """Context in which to start processes that ignore Ctrl-C. Only this process reacts to it, and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no pthread_sigmask
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(check: Check, rank: int, folder: str, sender: Connection) -> None:
    """Run a check in this process, with the process's output in a file."""
    with open(os.path.join(folder, f"{os.getpid()}.txt"), "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        function: Callable[..., Items] = load(check.function)
        for item in function(rank, folder) if check.ranks > 1 else function():
            sender.send(item)
    except BaseException as error:
        sender.send(_failed(check.name, f"raised {type(error).__name__}: {' '.join(text_of(error).split())}"))
    sender.send(None)


def _last_words(process: BaseProcess, folder: str) -> str:
    """Say how a process ended without a result, and quote the last line of its output."""
    process.join(5)
    output = Path(folder, f"{process.pid}.txt")
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    last = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
    return f"lost its process, which ended with exit code {process.exitcode}{last}"


def _failed(name: str, how: str) -> Finding:
    return Finding(
        f"The check {name!r} {how}.", "What it checks may not work here, or the check itself is wrong.",
        f"drivetrain doctor {name}, and look at what else uses this machine.",
    )  # fmt: skip
