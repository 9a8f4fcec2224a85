"""``trainer.history``: the logged values of a Trainer, in memory, as a column for each name.

[Note: what the history costs]
A value needs 24 bytes, for the value, the step and the epoch. Without a logger, values stay on the device until the
program reads the history, or until there are ``_UNREAD`` new rows. A training step does no work for the history. Only a
flush of the logbook, which transfers values from the device, adds a row.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.base.files import encodable
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import pandas, pyplot
from drivetrain.base.rank_zero import rank_from_environ
from drivetrain.errors import UnknownNameError, check_installed, did_you_mean
from drivetrain.logbook.reading import read_together

with on_first_use:
    from drivetrain.base import notebook

_UNREAD = 16
_MOST = 100_000


def _why_unrecorded() -> str:
    """Return a possible reason why the history of this process lacks a logged value."""
    if rank := rank_from_environ():
        return f"This is rank {rank}, and only rank 0 has the history: read it where trainer.is_global_zero is true."
    return (
        "Values per step are recorded every log_every_n_steps optimizer steps, by default 50, so a shorter fit has "
        "none: write Trainer(log_every_n_steps=1)."
    )


class Column(list[float]):
    """A list of the values of one name, the oldest first.

    Attributes:
        steps: the step that loggers get with each value.
        epochs: the index of the epoch of each value.
    """

    def __init__(self, values: Iterable[float], steps: Iterable[int], epochs: Iterable[int]) -> None:
        super().__init__(values)
        self.steps, self.epochs = list(steps), list(epochs)


class History(Mapping[str, Column]):
    """The values that loggers get, by name. For example, ``history["val_loss"]`` is a :class:`Column`.

    When a name has 100,000 values, the history drops every second value.

    Args:
        has_float64: whether the device has 64-bit floats.

    Attributes:
        logged: for each name in a call of ``self.log``, whether loggers get the values.
    """

    def __init__(self, has_float64: bool = True) -> None:
        self._has_float64 = has_float64
        self.logged: dict[str, bool] = {}
        self._columns: dict[str, tuple[array[float], array[int], array[int]]] = {}
        self._unread: list[tuple[dict[str, Any], int, int]] = []

    def add(self, values: Mapping[str, Any], step: int, epoch: int) -> None:
        """Add one row. Tensors in ``values`` are copied, without a transfer. A value named "step" replaces ``step``.

        Args:
            values: numbers, or tensors with one element, by name.
            step: the step of the row.
            epoch: the index of the epoch.
        """
        own = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._unread.append((own, step, epoch))
        if len(self._unread) >= _UNREAD:
            self._read()

    @property
    def columns(self) -> list[str]:
        """The names, in the order of their first values."""
        return list(self)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with the columns ``step``, ``epoch`` and one column for each name. Each step of
        an epoch with values has a row.

        Raises:
            MissingPackageError: the package pandas is not installed.
        """
        check_installed("trainer.history.to_pandas()", "pandas", "trainer.history[name], a list")
        rows: dict[tuple[int, int, int], dict[str, float]] = {}
        for name, column in self.items():
            # the number of earlier values at a step, because a test may be repeated at one step
            earlier = Counter[tuple[int, int]]()
            for value, step, epoch in zip(column, column.steps, column.epochs, strict=True):
                row = rows.setdefault((epoch, step, earlier[epoch, step]), {"step": step, "epoch": epoch})
                earlier[epoch, step] += 1
                row[name] = value
        columns = list(dict.fromkeys(("step", "epoch", *self)))
        return pandas.DataFrame([rows[key] for key in sorted(rows)], columns=columns)

    def __getitem__(self, name: str) -> Column:
        self._read()
        if name not in self._columns:
            raise UnknownNameError(f"trainer.history[{name!r}]: {self.why_missing(str(name), self._columns)}")
        return Column(*self._columns[name])

    def why_missing(self, name: str, known: Iterable[str]) -> str:
        """Return the message that no value is recorded under ``name``. The message suggests a name in ``known``."""
        if self.logged.get(name) is False:
            return "it is logged with logger=False, and only values for loggers are recorded. Leave logger=False out."
        if name in self.logged:
            return f"it is logged, and no value is recorded yet. {_why_unrecorded()}"
        which = " under this name" if name else ""
        return f"no value is recorded{which}. {did_you_mean(name, known)} {_why_unrecorded()}"

    def __iter__(self) -> Iterator[str]:
        self._read()
        return iter([*self._columns])

    def __len__(self) -> int:
        self._read()
        return len(self._columns)

    def __repr__(self) -> str:
        return f"History({', '.join(f'{name}: {len(column)} values' for name, column in self.items())})"

    def _repr_html_(self) -> str:
        rows = [
            (name, len(each), *(f"{value:.6g}" for value in (each[-1], min(each), max(each))), each.steps[-1])
            for name, each in self.items()
        ]
        return notebook.table(rows, ("name", "values", "last", "lowest", "highest", "last step"))

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return self.__dict__

    def _read(self) -> None:
        rows, self._unread = self._unread, []
        if not rows:
            return
        numbers, _ = read_together([value for row, _, _ in rows for value in row.values()], self._has_float64)
        flat = iter(numbers)
        for row, step, epoch in rows:
            read = {name: float(next(flat)) for name in row}
            step = int(read.pop("step", step))
            for name, value in read.items():
                values, steps, epochs = self._columns.setdefault(name, (array("d"), array("q"), array("q")))
                if len(values) >= _MOST:
                    del values[1::2], steps[1::2], epochs[1::2]
                values.append(value)
                steps.append(step)
                epochs.append(epoch)


# ---- figures --------------------------------------------------------------------------------------------------------


_COLUMNS = 3
_FEW = 50
"""The maximum number of points of a curve with markers. Without a marker, a single point is invisible."""


def figure_of(history: History, names: Sequence[str] = ()) -> Any:
    """Return a figure with a panel for each metric. A panel contains the curves of all stages, such as "train_loss" and
    "val_loss".

    Args:
        history: the values.
        names: names of values or panels to show. If ``names`` is empty, all are shown.

    Raises:
        MissingPackageError: the package matplotlib is not installed.
        UnknownNameError: nothing was logged, or nothing was logged under one of ``names``.
    """
    check_installed("trainer.plot()", "matplotlib", "trainer.history")
    panels: dict[str, list[str]] = {}
    for name in history:
        panels.setdefault(_panel(name), []).append(name)
    known = {*history, *panels}
    for name in names or ("",) * (not known):
        if name not in known:
            raise UnknownNameError(f"trainer.plot({name and repr(name)}): {history.why_missing(name, known)}")
    shown = {
        panel: wanted
        for panel, found in panels.items()
        if (wanted := [each for each in found if not names or each in names or panel in names])
    }
    across = min(len(shown), _COLUMNS)
    down = -(-len(shown) // across)
    figure, axes = pyplot.subplots(
        down, across, squeeze=False, layout="constrained", figsize=(max(4.2 * across, 6), 2.8 * down)
    )
    for ax, (panel, found) in zip(axes.flat, shown.items(), strict=False):
        for name in found:
            column, label = history[name], encodable(name)
            ax.plot(column.steps, column, marker="." if len(column) <= _FEW else "", linewidth=1.2, label=label)
        ax.set_title(encodable(panel), parse_math=False)  # parse_math=False: a "$" must not begin a formula
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        if found != [panel]:
            for text in ax.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
    for ax in axes.flat[len(shown) :]:
        ax.remove()
    if notebook.can_display():
        pyplot.close(figure)  # a notebook would show an open figure twice
    return figure


def _panel(name: str) -> str:
    """Return the name without the stage, "_step" and "_epoch". For example, "train_loss", "val/loss" and "loss_epoch"
    become "loss".
    """
    return re.sub(r"^(train|training|val|valid|validation|test)[_/.-](?=.)|_(step|epoch)$", "", name)
