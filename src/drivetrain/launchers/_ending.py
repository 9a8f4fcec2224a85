"""Describe how a rank's process has ended, and decide when the job's other ranks are killed."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board
from drivetrain.launchers.failure import Failure
from drivetrain.launchers.launcher import LaunchError
from drivetrain.launchers.signals import Sent, exception_of, was_asked_to_end
from drivetrain.launchers.watch import Watch

_POLL_S = 0.5  # seconds between two checks of the deadline, because a signal may have changed the deadline
_SAVED_S = 1.0  # seconds for a rank to end after its save


@dataclass(frozen=True)
class Ended:
    """How a process ended before its function returned."""

    failure: Failure
    exit_code: int = 1

    @property
    def asked(self) -> bool:
        """Whether a signal has asked the process to end."""
        return self.failure.interrupted or was_asked_to_end(self.exit_code)

    def error(self, rank: int, name: str, places: Sequence[str] = ()) -> BaseException:
        """Return the exception that the launching process raises.

        Args:
            rank: the global rank of the process.
            name: the name of the process in the message.
            places: lines about each rank's phase and step. The message begins with these lines.
        """
        if self.asked:
            interrupted = self.failure.interrupted or self.exit_code in (128 + signal.SIGINT, -signal.SIGINT)
            return exception_of(signal.SIGINT if interrupted else signal.SIGTERM)
        # the failure comes after ``places``, so that the message ends with the error
        lines = (*places, f"{name} {self.failure.summary}", self.failure.cure)
        error = LaunchError("\n".join(line for line in lines if line), rank, self.exit_code)
        error.__cause__ = self.failure.cause()
        return error


@dataclass(eq=False, repr=False)
class Ending:
    """Decides when the launching process kills the ranks that still run.

    Args:
        board: shows the progress of this machine's ranks. ``None`` if their progress is unknown.
        stop_timeout_s: the ranks have this many seconds to save.
        echo_s: seconds to wait for further reports after the first report of a failure. The first report may only be
            about a lost connection, and the rank that closed the connection may report later.
        clock: a monotonic clock, in seconds.

    Attributes:
        deadline: the time of ``clock`` at which the ranks are killed, or ``inf``.
        by_signal: whether the deadline was set because a signal has asked a rank to end.
    """

    board: Board | None
    stop_timeout_s: float
    echo_s: float
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(default=math.inf, init=False)
    by_signal: bool = field(default=False, init=False)
    _saves_until: float = field(default=math.inf, init=False)

    def turns(
        self, running: Collection[int], failed: Mapping[int, Ended], sent: Sent, send: Callable[[int], None]
    ) -> Iterator[float]:
        """Yield, again and again, for how many seconds the caller must wait for the end of a rank. The iterator ends
        when all ranks have ended, or when the caller must kill the remaining ranks.

        After each wait, the caller updates ``running`` and ``failed``.

        Args:
            running: the ranks that still run, by local rank on this machine.
            failed: for each rank that has failed, how it ended.
            sent: the signals that the launching process got.
            send: sends a signal to all ranks.

        Raises:
            LaunchError: the ranks wait for each other forever.
        """
        watch = None if self.board is None else Watch(self.board)
        ranks = () if self.board is None else self.board.ranks
        while running:
            left, count = min(self.deadline, sent.deadline) - self.clock(), len(running)
            yield max(0.0, min(left, _POLL_S))
            if left <= 0 and len(running) == count:
                return
            if failed:
                asked = any(each.asked for each in failed.values())
                by_itself = any(not (each.asked or each.failure.follows) for each in failed.values())
                here = [each for each in running if each < len(ranks)]
                # If this process got a signal, the ranks already have this signal and may be saving. A second signal
                # could interrupt the save.
                if self.look(here, asked=asked, failed=by_itself) and asked and sent.number is None:
                    send(signal.SIGTERM)
            elif watch is not None and sent.number is None and (text := watch.look()):
                raise LaunchError(text, ranks[0], 1)

    def look(self, running: Sequence[int], *, asked: bool, failed: bool) -> bool:
        """Update the deadline after a rank has failed or was asked to end. Return whether this is the first update.

        Args:
            running: the local ranks that still run.
            asked: whether a signal has asked a rank to end.
            failed: whether a rank has failed for a reason of its own, and not because of a signal or another rank's
                failure.
        """
        now, first = self.clock(), self.deadline == math.inf
        saves = self.board is not None and self.board.any(SAVES, running)
        if first:
            self._saves_until = now + self.stop_timeout_s
            wait_s = self.stop_timeout_s if asked else SAVE_BEGINS_S if saves else self.echo_s
            self.deadline, self.by_signal = now + wait_s, asked
        elif self.board is not None and now < self._saves_until and self.board.any(SAVING, running):
            self.deadline = max(self.deadline, now + _SAVED_S)
        if failed and not saves:
            self.deadline, self.by_signal = now, False
        return first
