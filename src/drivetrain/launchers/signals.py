"""Handle the signals that a launching process gets, and forward them to the ranks."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from drivetrain.errors import SIGTERMException
from drivetrain.launchers.board import Board, say

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_ENDS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_CODES = frozenset(code for number in (signal.SIGTERM, signal.SIGINT) for code in (128 + number, -number))
_AT_ONCE_S = 10.0  # after a second signal, the ranks have this many seconds to end


@dataclass
class Sent:
    """The signals that a launching process got.

    Attributes:
        number: the first signal that asks the job to end, or ``None``.
        deadline: when the remaining ranks are killed, in seconds of the monotonic clock, or ``inf``.
        limit_s: the seconds between a signal and the deadline.
    """

    number: int | None = None
    deadline: float = math.inf
    limit_s: float = math.inf


def was_asked_to_end(code: int) -> bool:
    """Return whether ``code`` is the exit code of a process that SIGTERM or SIGINT has ended."""
    return code in _CODES


def exception_of(number: int) -> BaseException:
    """Return the exception that ends a program after this signal."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SIGTERMException() if number == signal.SIGTERM else SystemExit(128 + number)


@contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Context in which this process has these signal handlers. At its end, the context restores the previous handlers.
    In other threads than the main thread the context has no effect, because Python can set handlers only in the main
    thread.
    """
    before = dict[int, Any]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                before[number] = signal.getsignal(number)
                signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Recorder:
    """A handler of SIGINT that only records the signal, until :meth:`end` lets the previous handler handle it."""

    def __init__(self, before: Any) -> None:
        self._before, self._came = before, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def end(self) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self._came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C does not interrupt the main thread. If Ctrl-C arrives, the context raises
    KeyboardInterrupt at its end.

    A process that is forked inside the context is not interrupted either, until the process calls
    :func:`allow_interrupts`. Without this context, Python discards the KeyboardInterrupt if Ctrl-C arrives while
    callbacks of ``os.register_at_fork`` run. It would not be enough to block the signal in this thread. The system
    would then send the signal to a native thread, and Python would still raise KeyboardInterrupt in the main thread. In
    other threads than the main thread the context has no effect.
    """
    before = signal.getsignal(signal.SIGINT)
    # None means that other code than Python's has set the handler, which Python could not restore. SIG_IGN must stay,
    # because spawned processes inherit it.
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, _Recorder(before))
    try:
        yield
    finally:
        allow_interrupts()


def allow_interrupts() -> None:
    """Let Ctrl-C interrupt this process, which may have been forked in :func:`without_interrupts`."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Recorder):
        handler.end()


@contextmanager
def forwarding(send: Callable[[int], None], stop_timeout_s: float) -> Iterator[Sent]:
    """Context in which this process forwards signals to the ranks. Yields a :class:`Sent`, which records the signals.

    If the user has a handler for SIGTERM, the handler is called first. A signal that the user ignores is not forwarded.
    A signal other than SIGTERM is also not forwarded if the user has a handler for this signal. In other threads than
    the main thread the context has no effect.

    Args:
        send: sends a signal to all ranks. It is called in a signal handler.
        stop_timeout_s: after a signal, the ranks have this many seconds to end.
    """
    sent, before = Sent(), dict[int, Any]()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and callable(own := before[number]):
            own(number, frame)  # if the handler raises an exception, the caller of launch ends the ranks
        if signal.Signals(number).name in _ENDS:
            again = sent.number is not None
            sent.number = sent.number or number
            sent.limit_s = min(_AT_ONCE_S, stop_timeout_s) if again else stop_timeout_s
            # min(), because a second signal must not extend the deadline
            sent.deadline = min(sent.deadline, time.monotonic() + sent.limit_s)
        send(number)

    numbers = [number for name in _PASSED_ON if (number := getattr(signal, name, None)) and _is_passed_on(number)]
    # stored before the handlers are set, because a signal may arrive at once
    before.update({number: signal.getsignal(number) for number in numbers})
    with handled(dict.fromkeys(numbers, handle)):
        yield sent


def _is_passed_on(number: int) -> bool:
    known = signal.getsignal(number)
    if known in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # SIGTERM concerns the whole job, so it is forwarded even if the user has a handler
    return number == signal.SIGTERM and callable(known)


def say_who_is_killed(board: Board, running: Mapping[int, int], limit_s: float) -> None:
    """Print a line for each rank that is killed because it has not ended in time after a signal.

    Args:
        board: shows the progress of the job's ranks.
        running: processes by local rank.
        limit_s: the number of seconds that the ranks had to end.
    """
    for local_rank, pid in running.items():
        say(
            f"Rank {board.ranks[local_rank]} (process {pid}) is killed, because it has not ended within {limit_s:g} s "
            f"of a signal. It was {board.place(local_rank)}. What it was saving is lost. "
            "Give ranks more time to save with Trainer(stop_timeout_s=...)."
        )
