"""Show progress in a notebook, as an HTML output that is updated in place. The saved notebook has the last state."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from html import escape
from typing import Any

from drivetrain.base import notebook
from drivetrain.callback import LightningModule, Trainer
from drivetrain.callbacks.plain_progress import PlainProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.loops.progress import RunningStage

_PAUSE_S = 0.2
_MOST_LEFT = 100
_LINE = "display:flex;flex-wrap:wrap;align-items:center;column-gap:1.5ch"
_FONT = "font-family:var(--jp-code-font-family,monospace);font-size:13px;line-height:1.5;overflow-wrap:anywhere"


class NotebookProgressBar(PlainProgressBar):
    """Shows a bar for the epoch, and a second bar for a running evaluation, in one output of a notebook's cell.

    The bar needs no ipywidgets. The output has the notebook's colours. In a script, or in a process that a notebook has
    started, the callback prints lines of text instead.

    Args:
        refresh_rate: the minimum number of batches between two updates; 0 turns the bar off.
        leave: keep the bars of finished epochs and evaluations, at most the last 100.

    Raises:
        ConfigurationError: ``refresh_rate`` is negative.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        self._left: deque[Snapshot] = deque(maxlen=_MOST_LEFT)
        self._now: dict[bool, Snapshot] = {}  # the current bars; the key is True for training
        self._output: Any = None
        self._sent_s = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_output": None}

    def draw(self, snapshot: Snapshot) -> None:
        """Update the bar of this stage."""
        if not notebook.can_display():
            super().draw(snapshot)
            return
        training = snapshot.is_training
        self._now[training] = snapshot
        if snapshot.final and (self.leave or snapshot.transient):
            del self._now[training]
            if self.leave:
                self._left.append(snapshot)
        if time.monotonic() - self._sent_s >= _PAUSE_S:  # short epochs must not cause more frequent updates
            self._send()

    def close(self) -> None:
        """Show the last state, which stays in the output."""
        super().close()
        self._send()
        self._left.clear()
        self._now.clear()
        self._output = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Show the last state of each bar."""
        if self._thread is not None and notebook.can_display():
            for training in (True, False):
                self._thread.show_now(training)
        super().on_exception(trainer, pl_module, exception)

    def _enter(self, trainer: Trainer, pl_module: LightningModule, stage: RunningStage) -> None:
        super()._enter(trainer, pl_module, stage)
        # draw from the main thread: an output that another thread creates may not appear below the running cell
        if self._output is None and self._thread is not None:
            self._thread.show_now(stage is RunningStage.TRAINING)

    def _send(self) -> None:
        now = [*self._now.values()]  # only the newest bar shows the metrics
        rows = [*self._left, *(replace(each, metrics={}) for each in now[:-1]), *now[-1:]]
        if not rows:
            return
        self._sent_s = time.monotonic()
        html = f'<div style="{_FONT}">{"".join(map(_html, rows))}</div>'
        text = "\n".join(f"{row.title}: {', '.join([*row.texts, *row.texts_of_metrics()])}" for row in rows)
        self._output = notebook.display(html, text, self._output)


def _html(row: Snapshot) -> str:
    """Return a line with the bar, and a second line if there are metrics."""
    bar = ""
    if row.num_batches is not None:
        bar = f'<progress value="{row.batch}" max="{row.num_batches}" style="flex:0 1 16em;min-width:4em"></progress>'
    title = f'<b style="min-width:10ch">{escape(row.title)}</b>'
    lines = [f"{title} {bar} {_spans(row.texts)}", _spans(row.texts_of_metrics())]
    return "".join(f'<div style="{_LINE}">{line}</div>' for line in lines if line)


def _spans(texts: list[str]) -> str:
    return " ".join(f"<span>{escape(each)}</span>" for each in texts)
