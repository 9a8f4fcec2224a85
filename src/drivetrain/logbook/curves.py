"""Figures of the logged values, drawn by matplotlib: ``trainer.plot()``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from drivetrain.base import notebook
from drivetrain.base.files import encodable
from drivetrain.base.packages import pyplot
from drivetrain.errors import UnknownNameError, check_installed
from drivetrain.logbook.history import History

_COLUMNS = 3
_FEW = 50
"""Points of a curve that are marked, because a line of one point would not be seen."""


def figure_of(history: History, names: Sequence[str] = ()) -> Any:
    """Return a figure with one panel for each metric; curves that differ in the stage only share it.

    Args:
        history: the values.
        names: names of values or of panels; none: all.

    Raises:
        MissingPackageError: the package matplotlib is not installed.
        UnknownNameError: nothing was logged, or nothing under one of the names.
    """
    check_installed("trainer.plot()", "matplotlib", "trainer.history")
    panels: dict[str, list[str]] = {}
    for name in history:
        panels.setdefault(_panel(name), []).append(name)
    known = {*history, *panels}
    for name in names or ("",) * (not known):
        if name not in known:
            raise UnknownNameError(f"trainer.plot({name and repr(name)}): {history.why_missing(name, known)}")
    wanted = {
        panel: [each for each in found if not names or each in names or panel in names]
        for panel, found in panels.items()
    }
    shown = {panel: found for panel, found in wanted.items() if found}
    across = min(len(shown), _COLUMNS)
    down = -(-len(shown) // across)
    figure, axes = pyplot.subplots(
        down, across, squeeze=False, layout="constrained", figsize=(max(4.2 * across, 6), 2.8 * down)
    )
    for ax, (panel, found) in zip(axes.flat, shown.items(), strict=False):
        for name in found:
            column, label = history[name], encodable(name)
            ax.plot(column.steps, column, marker="." if len(column) <= _FEW else "", linewidth=1.2, label=label)
        ax.set_title(encodable(panel), parse_math=False)  # a "$" in a name is no formula
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        if found != [panel]:
            for text in ax.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
    for ax in axes.flat[len(shown) :]:
        ax.remove()
    if notebook.can_display():
        pyplot.close(figure)  # a notebook shows the result of a cell, and each open figure once more
    return figure


def _panel(name: str) -> str:
    """Return the metric without its stage: "train_loss", "val/loss" and "loss_epoch" are "loss"."""
    return re.sub(r"^(train|training|val|valid|validation|test)[_/.-](?=.)|_(step|epoch)$", "", name)
