"""The model summary as a table drawn by rich."""

from __future__ import annotations

from typing import Any

from drivetrain.base.introspect import overrides
from drivetrain.callbacks.model_summary import ModelSummary, Summary
from drivetrain.errors import check_installed


class RichModelSummary(ModelSummary):
    """Prints the model's children, parameter counts and modes as a table when ``fit`` starts.

    With an ``example_input_array`` also sizes and operations, as :class:`~drivetrain.callbacks.ModelSummary` does.

    Args:
        max_depth: levels of submodules to list: 1 for the children, -1 for all, 0 for the totals alone.
        table_kwargs: passed on to ``rich.table.Table``: ``title``, ``header_style``, ...

    Raises:
        ConfigurationError: the package rich is not installed, or ``max_depth`` is below -1.
    """

    def __init__(self, max_depth: int = 1, **table_kwargs: Any) -> None:
        check_installed("RichModelSummary", "rich", "ModelSummary")
        super().__init__(max_depth)
        self._table_kwargs = table_kwargs

    def show(self, summary: Summary) -> None:
        """Print ``summary`` on rich's console; a subclass's ``summarize`` is called instead."""
        if overrides(self, "summarize", ModelSummary):
            self.summarize(**summary.as_arguments(), **self._table_kwargs)
            return
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        console = get_console()
        if summary.rows:
            table = Table(**{"header_style": "bold", **self._table_kwargs})
            for title in summary.header:
                table.add_column(title, justify="right" if title == "Params" else "left")
            for row in summary.rows:
                table.add_row(*(Text(cell) for cell in row.cells()))  # Text, because a name may contain brackets
            console.print(table)
        totals = Table.grid(padding=(0, 2))
        for value, meaning in summary.totals():
            totals.add_row(Text(value, style="bold"), meaning)
        console.print(totals)
