"""Show curves of the logged values in a notebook, and redraw the curves while a fit is running."""

from __future__ import annotations

import math
import time
from base64 import b64encode
from io import BytesIO
from typing import Any

from drivetrain.base import notebook
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import UnknownNameError, check_installed, wrong_value


class LivePlot(Callback):
    """Shows ``trainer.plot(*names)`` in a notebook, and redraws the plot in place while a fit is running.

    Training waits about a quarter of a second for each drawing. The last plot stays when the fit ends or fails. Outside
    of a notebook, and in a process that a notebook has started, the callback draws nothing and logs a warning.

    Args:
        names: the names of the values to draw, as in ``trainer.plot``; without names, all values are drawn.
        every_s: the minimum number of seconds between two drawings.

    Raises:
        ConfigurationError: the package matplotlib is not installed, or ``every_s`` is negative.
    """

    def __init__(self, *names: str, every_s: float = 10.0) -> None:
        super().__init__()
        check_installed("LivePlot", "matplotlib", "trainer.history")
        if every_s < 0:
            raise wrong_value("LivePlot", "every_s", every_s, "0 or more seconds", "every_s=10")
        self.names, self.every_s = names, every_s
        self._due_s = math.inf  # when the next drawing is due; infinite outside of a fit
        self._output: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_output": None}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new output in the notebook."""
        self._output, self._due_s = None, time.monotonic() + min(self.every_s, 1.0)
        if trainer.is_global_zero and not notebook.can_display():
            rank_zero_warn("LivePlot draws only in a notebook's own process. Call trainer.plot() after the fit.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Draw if ``every_s`` seconds have passed since the last drawing."""
        if time.monotonic() >= self._due_s:
            self._draw(trainer)

    on_validation_end = on_train_batch_end  # the validation that just ended has logged new values

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last values."""
        self._draw(trainer, last=True)
        self._due_s = math.inf

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Draw the last values if a fit fails."""
        if self._due_s < math.inf:
            self._draw(trainer)
            self._due_s = math.inf

    def _draw(self, trainer: Trainer, last: bool = False) -> None:
        if not notebook.can_display():
            return
        try:
            figure, picture = trainer.plot(*self.names), BytesIO()
        except UnknownNameError as error:  # no value was logged yet
            if last:
                rank_zero_warn(f"LivePlot: {error}")
            return
        figure.savefig(picture, dpi=100)
        source = b64encode(picture.getvalue()).decode()
        html = f'<img style="max-width:100%" alt="Curves of the logged values" src="data:image/png;base64,{source}">'
        self._output = notebook.display(html, repr(trainer.history), self._output)
        self._due_s = time.monotonic() + self.every_s
