"""The frames of another thread."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from drivetrain.advice.sampler import frames_of


def innermost(depth: int, waits: Callable[[], object]) -> None:
    if depth:
        innermost(depth - 1, waits)
    else:
        waits()


class Waiting(threading.Thread):
    """Waits under as many frames as asked for."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.there, self.over = depth, threading.Event(), threading.Event()

    def größe(self) -> None:
        self.there.set()
        self.over.wait()

    def run(self) -> None:
        innermost(self.depth, self.größe)


@pytest.fixture
def waiting() -> Iterator[Callable[[int], Waiting]]:
    started: list[Waiting] = []

    def start(depth: int) -> Waiting:
        started.append(Waiting(depth))
        started[-1].start()
        assert started[-1].there.wait(30)
        return started[-1]

    yield start
    for each in started:
        each.over.set()
        each.join()


def of_this_file(thread: int) -> list[str]:
    return [name for file, _, name in frames_of(thread) if file == __file__]


def test_the_frames_of_a_thread_are_read_innermost_first(waiting: Callable[[int], Waiting]) -> None:
    first, second = (waiting(depth).ident or 0 for depth in (40, 1))
    for _ in range(2):
        assert of_this_file(first) == ["größe", *["innermost"] * 41, "run"]
        assert of_this_file(second) == ["größe", *["innermost"] * 2, "run"]


def test_a_thread_that_has_ended_has_no_frames(waiting: Callable[[int], Waiting]) -> None:
    thread = waiting(1)
    ident = thread.ident or 0
    thread.over.set()
    thread.join()
    assert frames_of(ident) == []


def test_garbage_collection_is_on_or_off_as_before(waiting: Callable[[int], Waiting]) -> None:
    ident = waiting(1).ident or 0
    assert frames_of(ident)
    assert gc.isenabled()
    gc.disable()
    try:
        assert frames_of(ident)
        assert not gc.isenabled()
    finally:
        gc.enable()


class EndsThread:
    """Garbage whose finalizer lets a thread run to its end."""

    def __init__(self, thread: Waiting) -> None:
        self.itself, self.thread = self, thread

    def __del__(self) -> None:
        self.thread.over.set()
        self.thread.join()


def read_while_garbage_is_collected(allocations: int) -> None:
    """Read the frames of a thread; the collector runs after so many allocations, and then the thread ends."""
    signal.alarm(20)
    threading.stack_size(64 * 2**20)
    sys.setrecursionlimit(5000)
    thread = Waiting(2000)  # so many that the memory of its frames is unmapped
    thread.start()
    thread.there.wait()
    ident = thread.ident or 0
    gc.collect()
    gc.freeze()
    EndsThread(thread)
    gc.set_threshold(allocations)
    frames_of(ident)
    gc.collect()
    assert not thread.is_alive()


def crashes() -> int:
    """The number of processes that die while they read frames."""
    died = 0
    for allocations in range(10, 30):
        if (pid := os.fork()) == 0:
            read_while_garbage_is_collected(allocations)
            os._exit(0)
        died += os.waitpid(pid, 0)[1] != 0
    return died


def native_threads_start() -> None:
    """Read the frames of a thread while threads that Python has not started call Python, as threads of torch do."""
    import ctypes

    library, call = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda argument: None)
    over = threading.Event()

    def start() -> None:
        thread = ctypes.c_ulong()
        while not over.is_set():
            library.pthread_create(ctypes.byref(thread), None, call, None)
            library.pthread_join(thread, None)

    threads = [threading.Thread(target=start) for _ in range(12)]
    for each in threads:
        each.start()
    ident = threads[0].ident or 0
    for _ in range(1_500_000):
        assert frames_of(ident)
    over.set()
    for each in threads:
        each.join()


def in_a_child(code: str) -> subprocess.CompletedProcess[str]:
    imports = "import contextlib; from tests.advice import test_thread_stack; from drivetrain.advice import sampler"
    return subprocess.run([sys.executable, "-c", f"{imports}\n{code}"], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_thread_may_end_while_its_frames_are_read() -> None:
    found = in_a_child("print(test_thread_stack.crashes())")
    assert found.stdout == "0\n", found.stderr


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only Python 3.11 makes frames where it collects garbage")
def test_without_protection_the_process_crashes() -> None:
    """The negative control."""
    found = in_a_child("sampler._no_garbage_collection = contextlib.nullcontext; print(test_thread_stack.crashes())")
    assert int(found.stdout) > 0, found.stderr


@pytest.mark.skipif(os.name != "posix", reason="starts threads of pthreads")
@pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS") != "long", reason="takes half a minute: make test-faults")
def test_threads_that_python_has_not_started_do_no_harm() -> None:
    """With faulthandler in place of ``frames``, two of three such processes died, if three ran at once."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", "from tests.advice import test_thread_stack as t; t.native_threads_start()"]
        )
        for _ in range(3)
    ]
    assert [each.wait() for each in children] == [0, 0, 0]
