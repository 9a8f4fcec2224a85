"""A rank whose launching process is killed ends, also if its main thread never handles SIGTERM."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from torch.utils.data._utils import worker

import drivetrain
from drivetrain.launchers import orphan

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open, which Linux has")

ENDS_S = 60.0  # generous for a machine at work

# A launching process, its rank and the rank's worker. The rank's main thread waits in code that is not Python, as in a
# collective, so it never calls the handler of SIGTERM.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(drivetrain.__file__).parents[1])!r})
import contextlib, ctypes, os, signal
from drivetrain.launchers import orphan
launcher = os.getpid()
if os.fork():
    signal.pause()
os.setsid()
signal.signal(signal.SIGTERM, lambda *_: None)
orphan._ENDS_S = orphan._Grace.seconds = 0.2
if "follows" in sys.argv:
    orphan.follow(launcher)
    orphan.follow(launcher)
if not (worker := os.fork()):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pause()
with orphan.may_take(1000.0) if "saves" in sys.argv else contextlib.nullcontext():
    print(os.getpid(), worker, "torch" in sys.modules, flush=True)
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # it has it already, so this waits for ever
"""


@contextmanager
def job(*how: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """Context with a launching process, its rank and the rank's worker."""
    command = [sys.executable, "-c", PROGRAM, *how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank, worker, has_torch = launcher.stdout.readline().split()
        assert has_torch == "False"
        try:
            yield launcher, psutil.Process(int(rank)), psutil.Process(int(worker))
        finally:
            for pid in (int(rank), int(worker)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.kill()


def test_t31_a_rank_in_a_collective_ends_after_its_launching_process_was_killed() -> None:
    """One that has something to save may take longer; one that does not await the end, the control, lives on."""
    with job("follows") as (launcher, *ended), job("follows", "saves") as (other, *saving), job() as (last, *control):
        for each, rank in ((launcher, ended[0]), (other, saving[0]), (last, control[0])):
            each.kill()
            each.wait()
            rank.send_signal(signal.SIGTERM)  # as the system does
        gone, _ = psutil.wait_procs(ended, timeout=ENDS_S)
        assert len(gone) == 2
        assert all(process.is_running() for process in (*saving, *control))
        assert launcher.stderr is not None
        assert f"so process {ended[0].pid} ends too" in launcher.stderr.read()


WORKER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getsid(0), flush=True)
signal.pause()
"""


def test_a_worker_that_hangs_is_killed_with_its_rank_and_no_other_process_is() -> None:
    with ExitStack() as stack:
        processes = []
        for name, own_session in (("pt_data_worker", True), ("tensorboard", True), ("pt_data_worker", False)):
            command = [sys.executable, "-c", WORKER, name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=own_session)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        sessions = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
        orphan.kill_workers(sessions[:2])
        hangs, other, of_another_rank = processes
        assert hangs.wait(ENDS_S) == -signal.SIGKILL
        assert (other.poll(), of_another_rank.poll()) == (None, None)


def test_torch_names_its_workers_so() -> None:
    assert f'"{orphan._WORKER}"' in inspect.getsource(worker)
