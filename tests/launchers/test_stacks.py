"""What the system knows of a rank's process, and what its stacks tell."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.launchers.board import NAMESPACE, PID, Board, Sheet
from drivetrain.launchers.stacks import Answer, Process, ask, is_of_user, listen, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")


@contextmanager
def child(act: Callable[[], object]) -> Iterator[int]:
    """A copy of this process that does something and waits; it has done it, or is stopped in it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writes, b"x")
        act()
        signal.pause()
    try:
        os.read(reads, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def traced() -> None:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME: its parent is its debugger
    stopped()


@pytest.mark.parametrize(("act", "state", "is_traced"), [(stopped, "T", False), (traced, "t", True)])
def test_a_stopped_process_and_one_in_a_debugger_are_told_apart(
    act: Callable[[], None], state: str, is_traced: bool
) -> None:
    with child(act) as pid:
        os.waitpid(pid, os.WUNTRACED)
        found = process(pid)
        assert (found.state, found.traced, found.is_dead, found.answers) == (state, is_traced, False, False)


def test_a_process_that_has_ended_is_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process(pid).state == "Z"
    assert process(pid).is_dead
    os.waitpid(pid, 0)
    assert process(pid).is_dead


def ask_child(folder: Path, act: Callable[[], object], until: Callable[[Answer], bool]) -> Answer:
    """The answer of a child that listens and then acts, as soon as it is what it should be."""
    board = Board(folder, [0], 1)

    def begin() -> None:
        listen(folder, 0)
        listen(folder, 0)  # a second run
        act()

    with child(begin) as pid:
        write_pid(folder, pid)
        deadline = time.monotonic() + 30
        (answer,) = ask(board, [0])
        while not until(answer) and time.monotonic() < deadline:
            (answer,) = ask(board, [0])
        assert not process(pid).is_dead
    return answer


def test_a_rank_answers_with_its_stacks_and_its_collectives(tmp_path: Path) -> None:
    answer = ask_child(tmp_path, signal.pause, lambda answer: [frame[2] for frame in answer.main[:1]] == ["begin"])
    assert answer.trace is not None
    assert answer.trace.keys() == {"entries", "members"}
    assert [name for _, _, name in answer.main][:2] == ["begin", "child"]
    assert f"{__file__}:" in answer.line


def test_a_rank_that_keeps_the_lock_of_the_interpreter_shows_its_stacks_too(tmp_path: Path) -> None:

    def keep_lock() -> None:
        reads, _ = os.pipe()
        ctypes.PyDLL(None).read(reads, ctypes.create_string_buffer(1), 1)

    answer = ask_child(tmp_path, keep_lock, lambda answer: bool(answer.main) and answer.trace is None)
    assert answer.trace is None
    assert [name for _, _, name in answer.main][:2] == ["keep_lock", "begin"]


def write_pid(folder: Path, pid: int) -> None:
    sheet = Sheet(folder, 0)  # which writes the process of this one
    sheet.words[PID] = pid


def test_a_process_that_does_not_listen_is_not_signalled(tmp_path: Path) -> None:
    """The signal would kill it."""
    board = Board(tmp_path, [0], 1)
    with child(lambda: None) as pid:
        write_pid(tmp_path, pid)
        (answer,) = ask(board, [0])
        assert (answer.pid, answer.stacks, answer.trace) == (pid, "", None)
        assert not process(pid).is_dead


def test_a_rank_that_has_not_begun_is_not_asked(tmp_path: Path) -> None:
    (answer,) = ask(Board(tmp_path, [0], 1), [0])
    assert answer == Answer(0, Process())


def test_a_rank_in_a_container_of_its_own_does_not_count_as_dead(tmp_path: Path) -> None:
    """Its process has another number here, or none."""
    board = Board(tmp_path, [0], 1)
    write_pid(tmp_path, 2**22 + 1)  # beyond any process
    assert ask(board, [0])[0].process.is_dead
    Sheet(tmp_path, 0).words[NAMESPACE] = 1
    (answer,) = ask(board, [0])
    assert (answer.pid, answer.process.is_dead) == (0, False)


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/home/me/drivetrain/train.py", True),
        ("/x/lib/site-packages/torch/nn/modules/module.py", False),
        (os.__file__, False),
        (sys.modules["drivetrain.launchers.stacks"].__file__ or "", False),
        ("<frozen runpy>", False),
    ],
)
def test_code_of_the_user_is_known_by_its_folder(path: str, own: bool) -> None:
    assert is_of_user(path) is own
