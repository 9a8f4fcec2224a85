"""The results of an evaluation as a table for the terminal or a notebook."""

from __future__ import annotations

import shutil

from drivetrain.base import notebook


def results_table(stage: str, results: list[dict[str, float]], width: int | None = None) -> str:
    """Return the metrics of each loader as a table for the terminal: one row per metric, one column per loader.

    With several loaders, the suffix of their names (``/dataloader_idx_1``) becomes the column's heading. The field is
    empty if a loader has not logged a metric. If a table is wider than the terminal, the columns of the remaining
    loaders follow below.

    Args:
        stage: the title.
        results: one dictionary of metrics per loader.
        width: the terminal's width in characters; ``None``: determine it.
    """
    columns, names = _columns(results)
    if not names:
        return f"{stage}: nothing was logged"
    first = max(len(name) for name in names) + 2  # including the indent
    if len(columns) == 1:
        return "\n".join([f"{stage}:", *(f"{'  ' + name:<{first}}  {columns[0][name]}" for name in names)])
    headings = [f"loader {index}" for index in range(len(columns))]
    wide = [max(map(len, (heading, *column.values()))) + 2 for heading, column in zip(headings, columns, strict=True)]
    first = max(first, len(stage) + 1)
    fits = max(1, ((width or shutil.get_terminal_size().columns) - first) // max(wide))
    lines: list[str] = []
    for begin in range(0, len(columns), fits):
        shown = range(begin, min(begin + fits, len(columns)))
        lines.append(f"{stage + ':':<{first}}" + "".join(f"{headings[i]:>{wide[i]}}" for i in shown))
        lines += [
            f"{'  ' + name:<{first}}" + "".join(f"{columns[i].get(name, ''):>{wide[i]}}" for i in shown)
            for name in names
            if any(name in columns[i] for i in shown)
        ]
    return "\n".join(line.rstrip() for line in lines)


def results_html(stage: str, results: list[dict[str, float]]) -> str:
    """Return the same table as HTML."""
    columns, names = _columns(results)
    if not names:
        return notebook.table([(f"{stage}: nothing was logged",)])
    headings = [f"loader {index}" for index in range(len(columns))] if len(columns) > 1 else [""]
    return notebook.table([(name, *(column.get(name, "") for column in columns)) for name in names], [stage, *headings])


def _columns(results: list[dict[str, float]]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the texts of each loader's metrics, and all names."""
    columns = [
        {name.removesuffix(f"/dataloader_idx_{index}"): number_text(value) for name, value in result.items()}
        for index, result in enumerate(results)
    ]
    return columns, sorted({name for column in columns for name in column})


def number_text(value: float) -> str:
    """Return a metric's value as text: six digits, without an exponent if possible."""
    if 1e6 <= abs(value) < 1e15:
        return f"{value:.0f}"
    digits, exponent, power = f"{value:.6g}".partition("e")
    return f"{digits}{exponent}{int(power)}" if exponent else digits
