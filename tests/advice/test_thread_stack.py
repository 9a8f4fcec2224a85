"""The frames of another thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from drivetrain.advice import sampler
from drivetrain.advice.sampler import ThreadStack


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


def of_this_file(stack: ThreadStack) -> list[str]:
    return [name for file, _, name in stack.frames() if file == __file__]


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_the_frames_of_a_thread_are_read_innermost_first(
    waiting: Callable[[int], Waiting], monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sampler.os, "name", system)
        first, second = (ThreadStack(waiting(depth).ident or 0) for depth in (3, 1))
    for _ in range(2):
        assert of_this_file(first) == ["größe", *["innermost"] * 4, "run"]
        assert of_this_file(second) == ["größe", *["innermost"] * 2, "run"]
    first.close()
    second.close()


def test_frames_that_no_pipe_holds_are_read_from_a_file(
    waiting: Callable[[int], Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = ThreadStack(waiting(40).ident or 0)
    monkeypatch.setattr(sampler, "_PIPE_HOLDS", 4096 + 100)
    assert of_this_file(stack) == ["größe", *["innermost"] * 41, "run"]
    stack.close()


def test_nothing_stays_open(waiting: Callable[[int], Waiting]) -> None:
    number, before = waiting(1).ident or 0, os.listdir("/proc/self/fd")
    stack = ThreadStack(number)
    list(stack.frames())
    assert len(os.listdir("/proc/self/fd")) > len(before)  # the control
    stack.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_thread_that_has_ended_has_no_frames(waiting: Callable[[int], Waiting]) -> None:
    thread = waiting(1)
    stack = ThreadStack(thread.ident or 0)
    thread.over.set()
    thread.join()
    assert list(stack.frames()) == []
    stack.close()
