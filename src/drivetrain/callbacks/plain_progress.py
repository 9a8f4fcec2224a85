"""Progress as lines of text, for log files and terminals that cannot redraw a line."""

from __future__ import annotations

import time

from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import wrong_value


class PlainProgressBar(ProgressBar):
    """Prints a line when an epoch or an evaluation ends, and at intervals in between.

    Args:
        refresh_rate: the minimum number of batches between two lines; 0 turns the bar off.
        leave: no effect, because printed lines stay.
        interval_s: the minimum number of seconds between two lines.

    Raises:
        ConfigurationError: ``refresh_rate`` or ``interval_s`` is negative.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False, interval_s: float = 10.0) -> None:
        super().__init__(refresh_rate, leave)
        if interval_s < 0:
            raise wrong_value("PlainProgressBar", "interval_s", interval_s, "0 or more seconds", "interval_s=10")
        self.interval_s = interval_s
        self.tick_s = max(type(self).tick_s, interval_s)  # the bar need not check more often than it may print
        self._printed_at_s = time.monotonic()

    def draw(self, snapshot: Snapshot) -> None:
        """Print a line if it is due. The end of a sanity check, whose results are discarded, gets none."""
        now_s = time.monotonic()
        due = snapshot.stage != "sanity_check" if snapshot.final else now_s - self._printed_at_s >= self.interval_s
        if due:
            parts = [f"{snapshot.count_text} batches", snapshot.rate_text, snapshot.metrics_text]
            print(f"{snapshot.title}: {', '.join(part for part in parts if part)}", flush=True)
            self._printed_at_s = now_s
