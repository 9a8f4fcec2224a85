"""Progress drawn by rich, in a terminal or a notebook."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RichProgressBar(ProgressBar):
    """One bar for the epoch, and one below it for an evaluation while it runs.

    Args:
        refresh_rate: how many batches must have passed for it to be drawn again; 0 switches it off.
        leave: keep each finished epoch's bar, and each evaluation's.
        console_kwargs: arguments for a ``rich.console.Console`` of its own; by default it draws on rich's own one.

    Raises:
        ConfigurationError: the package rich is not installed, or ``refresh_rate`` is negative.
    """

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, *, console_kwargs: dict[str, Any] | None = None
    ) -> None:
        if importlib.util.find_spec("rich") is None:
            raise ConfigurationError(
                "RichProgressBar needs the package rich, which is not installed. "
                "Run `pip install rich`, or use PlainProgressBar."
            )
        super().__init__(refresh_rate, leave)
        self._console_kwargs = console_kwargs
        self._progress: Progress | None = None
        self._tasks: dict[bool, tuple[TaskID, str]] = {}  # by "is it training": the bar in use and what it shows

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_progress": None, "_tasks": {}}

    def draw(self, snapshot: Snapshot) -> None:
        """Move the bar of this stage, made on first use."""
        if self._progress is None:
            self._progress = self._open()
        progress, training = self._progress, snapshot.is_training
        task, title = self._tasks.get(training, (None, ""))
        fields: dict[str, Any] = {
            "count": snapshot.count_text,
            "rate": snapshot.rate_text,
            "metrics": snapshot.metrics_text,
        }
        if task is not None and title != snapshot.title:
            if self.leave:
                progress.stop_task(task)
            else:
                progress.remove_task(task)
            task = None
        if task is None:
            task = progress.add_task(snapshot.title, total=snapshot.num_batches, completed=snapshot.batch, **fields)
        progress.update(task, completed=snapshot.batch, total=snapshot.num_batches, **fields)
        self._tasks[training] = task, snapshot.title
        progress.refresh()
        if snapshot.final and not training:
            del self._tasks[False]
            progress.stop_task(task)
            if snapshot.transient and not self.leave:
                progress.remove_task(task)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        progress, self._progress = self._progress, None
        self._tasks = {}
        if progress is not None:
            progress.stop()

    def _open(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        # markup=False: a metric may be called "loss[0]"
        columns = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("count", "rate", "metrics")]
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), *columns[:2], TimeElapsedColumn(), columns[2],
            console=None if self._console_kwargs is None else Console(**self._console_kwargs),
            auto_refresh=False,  # else rich would run a thread of its own
        )  # fmt: skip
        progress.start()
        return progress
