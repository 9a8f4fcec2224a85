"""How long ranks may go on when one of them has failed, or was asked to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board

_SAVED_S = 1.0  # for a rank that has saved to end


@dataclass(eq=False, repr=False)
class Ending:
    """When the launching process kills the ranks that still run.

    Args:
        board: of the ranks of this machine; ``None``: there is none.
        stop_timeout_s: seconds that ranks have to save.
        echo_s: seconds in which the rank that broke an exchange reports it, after one that has lost the exchange.
        clock: in seconds; never goes back.

    Attributes:
        deadline: the time, by that clock; ``inf``: not at all.
        by_signal: the ranks have ``stop_timeout_s`` until then, because a signal has asked one to end.
    """

    board: Board | None
    stop_timeout_s: float
    echo_s: float
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(default=math.inf, init=False)
    by_signal: bool = field(default=False, init=False)
    _saves_until: float = field(default=math.inf, init=False)

    def look(self, running: Sequence[int], *, asked: bool, failed: bool) -> bool:
        """Look at the ranks, of which some have ended as they should not; return whether this is the first time.

        Args:
            running: local ranks that have not ended.
            asked: a signal has asked one to end.
            failed: one has failed by itself: not because a signal came, or because it lost another.
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
