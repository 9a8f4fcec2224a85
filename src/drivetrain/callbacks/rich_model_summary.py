"""Print the model summary as a table of rich."""

from __future__ import annotations

from typing import Any

from drivetrain.base.introspect import overrides
from drivetrain.base.packages import rich, rich_table, rich_text
from drivetrain.callbacks.model_summary import ModelSummary, Summary
from drivetrain.errors import check_installed


class RichModelSummary(ModelSummary):
    """Prints the model's children, parameter counts and modes as a table when ``fit`` starts.

    If the module has an ``example_input_array``, the table also shows shapes and operations, as
    :class:`~drivetrain.callbacks.ModelSummary` does.

    Args:
        max_depth: the number of levels of submodules to list: 1 for the children, -1 for all levels, 0 for the totals
            alone.
        table_kwargs: arguments for ``rich.table.Table``, such as ``title`` and ``header_style``.

    Raises:
        ConfigurationError: the package rich is not installed, or ``max_depth`` is below -1.
    """

    def __init__(self, max_depth: int = 1, **table_kwargs: Any) -> None:
        check_installed("RichModelSummary", "rich", "ModelSummary")
        super().__init__(max_depth)
        self._table_kwargs = table_kwargs

    def show(self, summary: Summary) -> None:
        """Print ``summary`` on rich's console. If a subclass overrides ``summarize``, call ``summarize`` instead."""
        if overrides(self, "summarize", ModelSummary):
            self.summarize(**summary.as_arguments(), **self._table_kwargs)
            return

        console = rich.get_console()
        if summary.rows:
            table = rich_table.Table(**{"header_style": "bold", **self._table_kwargs})
            for title in summary.header:
                table.add_column(title, justify="right" if title == "Params" else "left")
            for row in summary.rows:  # as Text, because rich reads brackets in a str as markup
                table.add_row(*(rich_text.Text(cell) for cell in row.cells()))
            console.print(table)
        totals = rich_table.Table.grid(padding=(0, 2))
        for value, meaning in summary.totals():
            totals.add_row(rich_text.Text(value, style="bold"), meaning)
        console.print(totals)
