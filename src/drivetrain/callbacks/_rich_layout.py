"""Fit the progress bars of rich into the terminal. If the terminal is narrow, metrics move below the bars, or are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from drivetrain.callbacks._progress_thread import lay_out

_WIDEST = 40
_LINES = 3
"""The maximum number of lines of metrics below the bars."""


class FittingProgress(Progress):
    """A ``rich.progress.Progress`` whose bars and columns depend on the width of the terminal.

    Args:
        columns: the columns that a wide terminal shows.
        delimiter: the text between two metrics below the bars.
        options: the named arguments of ``Progress``.
    """

    def __init__(self, *columns: ProgressColumn, delimiter: str, **options: Any) -> None:
        self._columns, self._delimiter = columns, delimiter
        self.lines = 0  # the number of lines that the bars occupy on the terminal
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the table of the bars. If the metrics do not fit beside the bars, yield them below."""
        tasks = [task for task in self.tasks if task.visible]
        if not tasks:  # the constructor of Progress calls this method before the attribute console exists
            return
        metrics = [each for each in self._columns if _field(each) == "metrics"]
        elapsed = [each for each in self._columns if isinstance(each, TimeElapsedColumn)]
        empty = [each for each in self._columns if _field(each) == "left" and not any(t.fields["left"] for t in tasks)]
        for left_out, fewest in ((empty, 20), (empty + metrics, 10), (empty + metrics + elapsed, 4)):
            room = self._choose(left_out, tasks)
            if room >= fewest:
                break
        yield self.make_tasks_table(self.tasks)
        self.lines = len(tasks)
        shown = next((task for task in tasks if task.fields["texts"]), None)
        if shown is not None and metrics and metrics[0] in left_out:
            style = getattr(metrics[0], "style", "none")
            for row in lay_out(shown.fields["texts"], self.console.width, _LINES, self._delimiter):
                self.lines += 1
                yield Text(row, style, no_wrap=True)

    def _choose(self, left_out: list[ProgressColumn], tasks: list[Task]) -> int:
        """Show all columns except ``left_out``. Give the bars the remaining width, and return this width."""
        self.columns = tuple(each for each in self._columns if each not in left_out)
        bars = [each for each in self.columns if isinstance(each, BarColumn)]
        for bar in bars:
            bar.bar_width = 0
        options = self.console.options.update(max_width=100_000)
        room = self.console.width - Measurement.get(self.console, options, self.make_tasks_table(tasks)).maximum
        for bar in bars:
            bar.bar_width = max(4, min(_WIDEST, room))
        return room


def _field(column: ProgressColumn) -> str:
    """Return the name of the field that a text column shows, such as "metrics"; "" for other columns."""
    text = column.text_format if isinstance(column, TextColumn) else ""
    return text.removeprefix("{task.fields[").removesuffix("]}") if text.startswith("{task.fields[") else ""
