"""Signals that a launching process is sent, and passes on to the ranks."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from drivetrain.errors import SIGTERMException
from drivetrain.launchers.board import Board

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_ENDS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_CODES = frozenset(code for number in (signal.SIGTERM, signal.SIGINT) for code in (128 + number, -number))
_AT_ONCE_S = 10.0  # for the ranks to end after a second signal


@dataclass
class Sent:
    """What a launching process was sent.

    Attributes:
        number: the first signal that is to end the job; ``None``: none so far.
        deadline: when ranks that still run are killed, in seconds of a monotonic clock; ``inf``: not at all.
        limit_s: how many seconds after a signal that is.
    """

    number: int | None = None
    deadline: float = math.inf
    limit_s: float = math.inf


def was_asked_to_end(code: int) -> bool:
    """Return whether ``code`` is that of a process which a signal has asked to end: all others were asked too."""
    return code in _CODES


def exception_of(number: int) -> BaseException:
    """Return what ends a program that was sent this signal."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SIGTERMException() if number == signal.SIGTERM else SystemExit(128 + number)


@contextmanager
def forwarding(send: Callable[[int], None], stop_timeout_s: float) -> Iterator[Sent]:
    """Context in which signals are passed on to the ranks, which save and end; gets what has come.

    A handler of the user's for SIGTERM is called first, as in a fit. Handlers for other signals, and signals that are
    ignored, stay as they are. Outside of the main thread nothing changes.

    Args:
        send: sends a signal to all ranks; it is called in a signal's handler.
        stop_timeout_s: seconds that the ranks have to end.
    """
    sent, before = Sent(), dict[int, Any]()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and callable(own := before[number]):
            own(number, frame)  # an exception that it raises ends this process, and the ranks with it
        if signal.Signals(number).name in _ENDS:
            again = sent.number is not None
            sent.number = sent.number or number
            sent.limit_s = min(_AT_ONCE_S, stop_timeout_s) if again else stop_timeout_s
            sent.deadline = min(sent.deadline, time.monotonic() + sent.limit_s)  # no signal gives more time
        send(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for name in _PASSED_ON:
                number = getattr(signal, name, None)
                if number is not None and _is_passed_on(number):
                    before[number] = signal.getsignal(number)  # now: the signal may come as soon as it is handled
                    signal.signal(number, handle)
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_passed_on(number: int) -> bool:
    known = signal.getsignal(number)
    if known in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return number == signal.SIGTERM and callable(known)  # who sends it means the whole job


def say_who_is_killed(board: Board, running: Mapping[int, int], limit_s: float) -> None:
    """Print which ranks are killed because they have not ended in the time that they had after a signal.

    Args:
        board: of the job.
        running: processes by local rank.
        limit_s: seconds that they had.
    """
    for local_rank, pid in running.items():
        text = (
            f"Rank {board.ranks[local_rank]} (process {pid}) is killed, because it has not ended within {limit_s:g} s "
            f"of a signal. It was {board.place(local_rank)}. What it was saving is lost. "
            "Trainer(stop_timeout_s=...) is how long ranks have to save."
        )
        print(text, file=sys.stderr, flush=True)
