"""Progress drawn by tqdm."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from drivetrain.base.packages import tqdm_auto, tqdm_utils
from drivetrain.callbacks._progress_thread import DRAWING, lay_out
from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import WrongTypeError, check_installed
from drivetrain.loops.stop import note


class TQDMProgressBar(ProgressBar):
    """Shows a bar for the epoch, and one below it for a running evaluation.

    A subclass may override :meth:`init_train_tqdm` and the similar methods to return another tqdm bar, and
    :meth:`get_metrics`. An override is called when a bar is created or drawn, never in a step.

    Args:
        refresh_rate: the minimum number of batches between two updates; 0 turns the bar off. If the environment
            variable ``TQDM_MINITERS`` of tqdm has a larger value, that value is used.
        process_position: the terminal line of the bar, counted from 0, so that several runs can share one terminal.
        leave: keep the bar of each finished epoch on the screen.

    Raises:
        ConfigurationError: the package tqdm is not installed, or ``refresh_rate`` is negative.
    """

    BAR_FORMAT: ClassVar[str | None] = None
    """The format of a bar, as for tqdm's argument ``bar_format``; ``None``: tqdm's default format."""

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_installed("TQDMProgressBar", "tqdm", "RichProgressBar")
        fewest = os.environ.get("TQDM_MINITERS", "")
        super().__init__(max(refresh_rate, int(fewest)) if refresh_rate and fewest.isdecimal() else refresh_rate, leave)
        self.process_position = process_position
        # whether the new bar is removed when its stage has ended, as for an evaluation inside training
        self._transient = False
        # the key says whether the stage is training; the value is the current bar and its text, which is "" after an
        # evaluation
        self._bars: dict[bool, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = None, flush: bool = False, **kwargs: Any
    ) -> None:
        """Print above the bar; accepts the arguments of the built-in and of tqdm's ``write``. ``flush`` is ignored."""
        with DRAWING:
            tqdm_auto.tqdm.write(
                (" " if sep is None else sep).join(map(str, args)), end="\n" if end is None else end, **kwargs
            )

    # ---- for subclasses ------------------------------------------------------------------------------------------

    def init_train_tqdm(self) -> Any:
        """Return a new bar for epochs; the methods with the other names return one for an evaluation."""
        return _new_bar(
            bar_format=self.BAR_FORMAT, position=self.process_position + self._transient, leave=not self._transient
        )

    init_sanity_tqdm = init_validation_tqdm = init_test_tqdm = init_predict_tqdm = init_train_tqdm

    @property
    def train_progress_bar(self) -> Any:
        """The bar for epochs; ``None`` if there is none."""
        return self._bar(True)

    @property
    def val_progress_bar(self) -> Any:
        """The bar of the running evaluation, or of the last one; the properties below are aliases."""
        return self._bar(False)

    sanity_progress_bar = test_progress_bar = predict_progress_bar = val_progress_bar

    def _bar(self, training: bool) -> Any:
        if training and training not in self._bars and self._trainer is not None and self.trainer.sanity_checking:
            return _new_bar(disable=True)  # the bar exists, but shows nothing
        if not self._bars.get(training, (None, ""))[1]:
            self._draw_unread(training)
        if training not in self._bars:
            raise WrongTypeError(
                f"{type(self).__name__} has no bar of {'training' if training else 'an evaluation'} now. Read it in a "
                "run, from a hook of its batches on."
            )
        return self._bars[training][0]

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        """Update the bar of the snapshot's stage; the bar is created on first use."""
        training = snapshot.is_training
        bar, title = self._bars.get(training, (None, ""))
        if note.is_written:  # the next message would begin on the line of the redrawn bar
            return
        if bar is not None and title != snapshot.title:
            if self.leave or not training:
                bar.close()
                bar = None
            else:
                bar.reset()
        if bar is None:
            self._transient = snapshot.transient
            bar = getattr(self, _INIT[snapshot.stage])()
        bar.set_description_str(snapshot.title, refresh=False)
        bar.total, bar.n = snapshot.num_batches, snapshot.batch
        bar.measured = snapshot.rate
        self._set_postfix(bar, snapshot)
        bar.refresh()
        note.stand_above(bool(getattr(getattr(bar, "fp", None), "isatty", bool)()))
        ended = snapshot.final and not training
        self._bars[training] = bar, "" if ended else snapshot.title
        if ended:
            bar.close()

    def _set_postfix(self, bar: Any, snapshot: Snapshot) -> None:
        """Show as many metrics as there is room for after a bar of 10 columns, and the number of those that are left
        out.
        """
        bar.set_postfix(snapshot.metrics, refresh=False)
        # tqdm itself shows the remaining time of the epoch, as in <00:15
        fit = snapshot.fit_left_text.replace(" ", "<")
        first = [each for each in (fit, snapshot.waiting_text) if each]
        texts = [*first, *filter(None, str(bar.postfix).split(", "))]
        bar.postfix = ""
        shown = bar.format_dict
        columns = shown.get("ncols") or 10_000  # a file has no width, so all metrics are shown
        width = columns - tqdm_utils.disp_len(bar.format_meter(**{**shown, "ncols": None})) - len(", ")
        bar.postfix = "".join(lay_out(texts, width))

    def close(self) -> None:
        """Close the bars; their last state stays on the screen."""
        bars, self._bars = self._bars, {}
        for bar, _ in bars.values():
            bar.close()
        note.stand_above()


_INIT = {
    "train": "init_train_tqdm", "sanity_check": "init_sanity_tqdm", "validate": "init_validation_tqdm",
    "test": "init_test_tqdm", "predict": "init_predict_tqdm",
}  # fmt: skip
"""For each stage, the method that creates its bar."""


def _new_bar(**kwargs: Any) -> Any:
    class Bar(tqdm_auto.tqdm):  # type: ignore[type-arg]  # only the stubs have a type argument
        monitor_interval = 0  # otherwise tqdm would start a thread of its own
        measured = 0.0

        @property
        def format_dict(self) -> Any:
            # tqdm's own rate would include the time of validation, because it divides by all the time since the bar
            # began
            return {**super().format_dict, "rate": self.measured}

    return Bar(dynamic_ncols=True, **kwargs)
