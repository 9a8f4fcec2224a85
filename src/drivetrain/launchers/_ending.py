"""How long ranks may go on when one of them has failed, or was asked to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board

_SAVED_S = 1.0  # for a rank that has saved to end


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

    def __init__(
        self,
        board: Board | None,
        stop_timeout_s: float,
        echo_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._stop_timeout_s, self._echo_s, self._clock = board, stop_timeout_s, echo_s, clock
        self.deadline = self._saves_until = math.inf
        self.by_signal = False

    def look(self, running: Sequence[int], *, asked: bool, failed: bool) -> bool:
        """Look at the ranks, of which some have ended as they should not; return whether this is the first time.

        Args:
            running: local ranks that have not ended.
            asked: a signal has asked one to end.
            failed: one has failed by itself: not because a signal came, or because it lost another.
        """
        now, first = self._clock(), self.deadline == math.inf
        saves = self._board is not None and self._board.any(SAVES, running)
        if first:
            self._saves_until = now + self._stop_timeout_s
            wait_s = self._stop_timeout_s if asked else SAVE_BEGINS_S if saves else self._echo_s
            self.deadline, self.by_signal = now + wait_s, asked
        elif self._board is not None and now < self._saves_until and self._board.any(SAVING, running):
            self.deadline = max(self.deadline, now + _SAVED_S)
        if failed and not saves:
            self.deadline, self.by_signal = now, False
        return first
