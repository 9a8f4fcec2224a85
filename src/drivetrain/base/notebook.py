"""Show outputs in a notebook, as HTML and as a text for programs that show no HTML."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from drivetrain.base.lazy import IMPORTED_IN
from drivetrain.base.packages import ipython_display

_CELL = 'style="text-align:left;vertical-align:top;overflow-wrap:break-word"'
_HEAD = 'style="text-align:left;white-space:nowrap"'


def can_display() -> bool:
    """Whether this process is a notebook's kernel. False in a process forked from the kernel, because Jupyter drops the
    forked process's outputs.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None and os.getpid() == IMPORTED_IN


def display(html: str, text: str, shown: Any = None) -> Any:
    """Show an output in the running cell, or in place of the output ``shown``, which any thread may replace. Return
    IPython's handle of the output, which the next call may get as ``shown``.
    """
    output = {"text/html": html, "text/plain": text}
    if shown is None:
        return ipython_display.display(output, raw=True, display_id=True)
    shown.update(output, raw=True)
    return shown


def show(text: str, html: str = "", file: Any = None) -> None:
    """Show an output in a notebook, if there is ``html``; else print ``text`` to ``file``, by default stdout."""
    if html and can_display():
        display(html, text)
    else:
        print(text, file=file, flush=True)


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table as HTML. Every cell is escaped, and text wraps, so the table is no wider than the page."""
    head = "".join(f"<th {_HEAD}>{escape(each)}</th>" for each in header)
    lines = ["".join(f"<td {_CELL}>{escape(str(cell))}</td>" for cell in row) for row in rows]
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="max-width:100%">{top}<tbody>{body}</tbody></table>'
