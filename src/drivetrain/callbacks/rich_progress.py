"""Show progress with the package rich, in a terminal or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import rich_console, rich_progress
from drivetrain.callback import Trainer
from drivetrain.callbacks._progress_thread import DRAWING
from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import check_installed
from drivetrain.loops.stop import note

with on_first_use:
    from drivetrain.callbacks import _rich_layout

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID


@dataclass
class RichProgressBarTheme:
    """Styles for the parts of a :class:`RichProgressBar`; "" is rich's default style.

    Attributes:
        description: the style of the stage's name.
        progress_bar, progress_bar_finished, progress_bar_pulse: the styles of an unfinished bar, a finished bar, and a
            bar without a known number of batches.
        batch_progress, time, processing_speed, metrics: the styles of the texts beside the bar.
        metrics_text_delimiter: the text between two metrics.
        metrics_format: the format of a float, as for the built-in ``format``.
    """

    description: str = ""
    progress_bar: str = "bar.complete"
    progress_bar_finished: str = "bar.finished"
    progress_bar_pulse: str = "bar.pulse"
    batch_progress: str = ""
    time: str = "progress.elapsed"
    processing_speed: str = ""
    metrics: str = ""
    metrics_text_delimiter: str = ", "
    metrics_format: str = ".4g"


class RichProgressBar(ProgressBar):
    """Shows a bar for the epoch, and a second bar for a running evaluation.

    Args:
        refresh_rate: the minimum number of batches between two updates; 0 turns the bar off.
        leave: keep the bar of each finished epoch and each finished evaluation.
        theme: the styles of the bar's parts.
        console_kwargs: arguments for a new ``rich.console.Console``; without them, rich's global console is used.

    Raises:
        ConfigurationError: the package rich is not installed, or ``refresh_rate`` is negative.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_installed("RichProgressBar", "rich", "PlainProgressBar")
        super().__init__(refresh_rate, leave)
        self.theme = RichProgressBarTheme() if theme is None else theme
        self._console_kwargs = console_kwargs
        self._progress: _rich_layout.FittingProgress | None = None
        # the current bars, each with its title; "" if the evaluation has ended. The key is True for training
        self._tasks: dict[bool, tuple[TaskID, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_progress": None, "_tasks": {}}

    @property
    def progress(self) -> Progress | None:
        """The ``Progress`` that rich draws; ``None`` outside a run."""
        if self._progress is None:
            self._draw_unread(True)
            self._draw_unread(False)
        return self._progress

    def draw(self, snapshot: Snapshot) -> None:
        """Update the bar of the snapshot's stage. The first call creates the bar."""
        if self._progress is None:
            self._progress = self._open()
        progress, training = self._progress, snapshot.is_training
        task, title = self._tasks.get(training, (None, ""))
        texts = [each for each in (snapshot.waiting_text,) if each]
        texts += snapshot.texts_of_metrics(self.theme.metrics_format)
        fields: dict[str, Any] = {
            "count": snapshot.count_text,
            "rate": snapshot.rate_text,
            "left": snapshot.left_text,
            "metrics": self.theme.metrics_text_delimiter.join(texts),
            "texts": texts,
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
        ended = snapshot.final and not training
        self._tasks[training] = task, "" if ended else snapshot.title
        progress.refresh()
        note.stand_above(progress.lines if progress.console.is_terminal else 0)
        if ended:
            progress.stop_task(task)
            progress.update(task, visible=self.leave or not snapshot.transient)

    def close(self) -> None:
        """Stop rich's display. The last state of the bars stays on the screen."""
        progress, self._progress = self._progress, None
        self._tasks = {}
        if progress is not None:
            progress.stop()
            note.stand_above()

    # ---- for subclasses ------------------------------------------------------------------------------------------

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return the columns of the bars, for ``rich.progress.Progress``. The first :meth:`draw` calls this method."""
        theme = self.theme
        styles = {"count": theme.batch_progress, "rate": theme.processing_speed, "left": theme.time}
        styles["metrics"] = theme.metrics
        texts = {  # markup=False, because a metric may be called "loss[0]"
            name: rich_progress.TextColumn(f"{{task.fields[{name}]}}", markup=False, style=style or "none")
            for name, style in styles.items()
        }
        bar = rich_progress.BarColumn(
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        description = rich_progress.TextColumn("{task.description}", style=theme.description or "none")
        elapsed = rich_progress.TimeElapsedColumn()
        return [description, bar, texts["count"], texts["rate"], elapsed, texts["left"], texts["metrics"]]

    def refresh(self, hard: bool = False) -> None:
        """Draw the bars again; ``hard`` is ignored."""
        if self._progress is not None:
            with DRAWING:
                self._progress.refresh()

    @property
    def train_progress_bar_id(self) -> TaskID | None:
        """The id of the bar for epochs in :attr:`progress`; ``None`` if there is none."""
        return self._task_id(True)

    @property
    def val_progress_bar_id(self) -> TaskID | None:
        """The id of the bar of the running or last evaluation; ``None`` if there is none."""
        return self._task_id(False)

    val_sanity_progress_bar_id = test_progress_bar_id = predict_progress_bar_id = val_progress_bar_id

    @property
    def train_progress_bar(self) -> Task | None:
        """The bar for epochs; ``None`` if there is none."""
        return self._task(self.train_progress_bar_id)

    @property
    def val_progress_bar(self) -> Task | None:
        """The bar of the running or last evaluation; ``None`` if there is none."""
        return self._task(self.val_progress_bar_id)

    val_sanity_check_bar = test_progress_bar = predict_progress_bar = val_progress_bar

    def _task_id(self, training: bool) -> TaskID | None:
        if not self._tasks.get(training, (None, ""))[1]:
            self._draw_unread(training)
        return self._tasks[training][0] if training in self._tasks else None

    def _task(self, task_id: TaskID | None) -> Task | None:
        tasks = [] if self._progress is None else self._progress.tasks
        return next((task for task in tasks if task.id == task_id), None)

    def _open(self) -> _rich_layout.FittingProgress:
        trainer: Any = None if self._trainer is None else self._trainer()  # None if draw() is called outside a run
        progress = _rich_layout.FittingProgress(
            *self.configure_columns(trainer),
            delimiter=self.theme.metrics_text_delimiter,
            console=None if self._console_kwargs is None else rich_console.Console(**self._console_kwargs),
            auto_refresh=False,  # with auto_refresh, rich would start another thread
        )
        progress.start()
        return progress
