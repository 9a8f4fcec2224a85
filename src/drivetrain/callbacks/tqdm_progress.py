"""Show progress with the package tqdm."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from drivetrain.base.packages import tqdm_auto, tqdm_utils
from drivetrain.callbacks._progress_thread import DRAWING, lay_out
from drivetrain.callbacks.progress_bar import ProgressBar, Snapshot
from drivetrain.errors import WrongTypeError, check_installed
from drivetrain.loops.stop import note


class TQDMProgressBar(ProgressBar):
    """Shows a bar for the epoch, and a second bar for a running evaluation.

    A subclass may override :meth:`get_metrics` to show other values. To use other bars of tqdm, override
    :meth:`init_train_tqdm` and similar methods. A training step calls none of these methods.

    Args:
        refresh_rate: the minimum number of batches between two updates; 0 turns the bar off. A larger value in tqdm's
            environment variable ``TQDM_MINITERS`` takes precedence.
        process_position: the line of the bar in the terminal, counted from 0. Runs that share a terminal need different
            lines.
        leave: keep the bar of each finished epoch on the screen.

    Raises:
        ConfigurationError: the package tqdm is not installed, or ``refresh_rate`` is negative.
    """

    BAR_FORMAT: ClassVar[str | None] = None
    """The value of tqdm's argument ``bar_format``; ``None`` means tqdm's default format."""

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_installed("TQDMProgressBar", "tqdm", "RichProgressBar")
        fewest = os.environ.get("TQDM_MINITERS", "")
        super().__init__(max(refresh_rate, int(fewest)) if refresh_rate and fewest.isdecimal() else refresh_rate, leave)
        self.process_position = process_position
        # whether to remove the next new bar when its stage ends
        self._transient = False
        # the current bars, each with its title; "" if the evaluation has ended. The key is True for training
        self._bars: dict[bool, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = None, flush: bool = False, **kwargs: Any
    ) -> None:
        """Print above the bar. The arguments are those of the built-in ``print`` and of tqdm's ``write``. ``flush`` is
        ignored.
        """
        with DRAWING:
            tqdm_auto.tqdm.write(
                (" " if sep is None else sep).join(map(str, args)), end="\n" if end is None else end, **kwargs
            )

    # ---- for subclasses ------------------------------------------------------------------------------------------

    def init_train_tqdm(self) -> Any:
        """Return a new bar for the batches of training epochs. :meth:`init_validation_tqdm` and the other methods
        return a bar for an evaluation.
        """
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
        """The bar of the running or last evaluation."""
        return self._bar(False)

    sanity_progress_bar = test_progress_bar = predict_progress_bar = val_progress_bar

    def _bar(self, training: bool) -> Any:
        if training and training not in self._bars and self._trainer is not None and self.trainer.sanity_checking:
            return _new_bar(disable=True)  # a bar that shows nothing
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
        """Update the bar of the snapshot's stage. The first call creates the bar."""
        training = snapshot.is_training
        bar, title = self._bars.get(training, (None, ""))
        if note.is_written:  # after Ctrl-C, draw no more, so that later messages begin on a new line
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
        """Show as many metrics as fit beside a bar of 10 columns, and the number of metrics that do not fit."""
        bar.set_postfix(snapshot.metrics, refresh=False)
        # tqdm itself shows the remaining time of the epoch, as in <00:15
        fit = snapshot.fit_left_text.replace(" ", "<")
        first = [each for each in (fit, snapshot.waiting_text) if each]
        texts = [*first, *filter(None, str(bar.postfix).split(", "))]
        bar.postfix = ""
        shown = bar.format_dict
        columns = shown.get("ncols") or 10_000  # lines of a file have no limit
        width = columns - tqdm_utils.disp_len(bar.format_meter(**{**shown, "ncols": None})) - len(", ")
        bar.postfix = "".join(lay_out(texts, width))

    def close(self) -> None:
        """Close the bars. The last state of the bars stays on the screen."""
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
        monitor_interval = 0  # otherwise tqdm would start a thread
        measured = 0.0

        @property
        def format_dict(self) -> Any:
            # tqdm's own rate would include the time of validations
            return {**super().format_dict, "rate": self.measured}

    return Bar(dynamic_ncols=True, **kwargs)
