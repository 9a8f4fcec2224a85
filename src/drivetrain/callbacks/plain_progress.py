"""Show progress as lines of text, for log files and terminals that cannot redraw a line."""

from __future__ import annotations

import time

from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import wrong_value

_LONGEST_S = 600.0


class PlainProgressBar(ProgressBar):
    """Prints a line at growing intervals during an epoch or an evaluation, and a line at the end.

    Each line begins with the date. The interval doubles after each line, up to 10 minutes, so the log of a long run
    stays short.

    Args:
        refresh_rate: the minimum number of batches between two lines; 0 turns the bar off.
        leave: has no effect, because printed lines always stay.
        interval_s: the first interval, in seconds.

    Raises:
        ConfigurationError: ``refresh_rate`` or ``interval_s`` is negative.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False, interval_s: float = 10.0) -> None:
        super().__init__(refresh_rate, leave)
        if interval_s < 0:
            raise wrong_value("PlainProgressBar", "interval_s", interval_s, "0 or more seconds", "interval_s=10")
        self.interval_s = interval_s
        self._printed_at_s, self._pause_s = time.monotonic(), interval_s

    def draw(self, snapshot: Snapshot) -> None:
        """Print a line if the interval is over or the stage has ended. No line is printed at the end of a sanity check,
        or before the first batch of a running stage.
        """
        now_s = time.monotonic()
        waited = snapshot.batch > 0 and now_s - self._printed_at_s >= self._pause_s
        due = snapshot.stage != "sanity_check" if snapshot.final else waited
        if due:
            in_fit = snapshot.is_training or snapshot.transient
            step = f"step {snapshot.step}" if in_fit else ""
            title = snapshot.title
            if snapshot.transient and snapshot.stage != "sanity_check":
                title += f" in epoch {snapshot.epoch_text}"
            count, *others = snapshot.texts
            text = ", ".join(part for part in (count, step, *others, snapshot.metrics_text) if part)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}: {text}", flush=True)
            self._printed_at_s = now_s
            if not snapshot.final:
                self._pause_s = min(2 * self._pause_s, max(self.interval_s, _LONGEST_S))

    def close(self) -> None:
        """Set the interval back to ``interval_s`` for the next run."""
        self._printed_at_s, self._pause_s = time.monotonic(), self.interval_s
