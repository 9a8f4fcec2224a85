"""Tables of profilers."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below ``header``: the first column left-aligned, numbers right-aligned."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, rule, line(header), rule, *map(line, rows), rule])
