"""How long the other ranks may run after a rank has failed or was asked to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board

_SAVED_S = 1.0  # seconds for a rank to end after its save


@dataclass(eq=False, repr=False)
class Ending:
    """When the launching process kills the ranks that still run.

    Args:
        board: the board of this machine's ranks; ``None``: there is no board.
        stop_timeout_s: seconds for the ranks to save.
        echo_s: seconds to wait after the first failure. The rank with this failure may only have lost its connection to
            another rank, which failed first but reports later.
        clock: a monotonic clock, in seconds.

    Attributes:
        deadline: the time of ``clock`` at which the ranks are killed; ``inf``: never.
        by_signal: whether a signal has asked a rank to end; then the ranks have ``stop_timeout_s``.
    """

    board: Board | None
    stop_timeout_s: float
    echo_s: float
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(default=math.inf, init=False)
    by_signal: bool = field(default=False, init=False)
    _saves_until: float = field(default=math.inf, init=False)

    def look(self, running: Sequence[int], *, asked: bool, failed: bool) -> bool:
        """Update the deadline when ranks have failed or were asked to end; return whether this is the first such
        update.

        Args:
            running: the local ranks that still run.
            asked: whether a signal has asked a rank to end.
            failed: whether a rank has failed by itself, not because of a signal or of another rank.
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
