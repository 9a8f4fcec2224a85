"""Show outputs in a notebook, as HTML and as plain text."""

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
    """Return whether this process is a notebook's kernel. The result is False in a process that the kernel has forked,
    because Jupyter drops its outputs.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None and os.getpid() == IMPORTED_IN


def display(html: str, text: str, shown: Any = None) -> Any:
    """Show an output in the running cell, or replace the earlier output ``shown``. Return IPython's handle of the
    output, to pass as ``shown`` in the next call. Any thread can replace an output.
    """
    output = {"text/html": html, "text/plain": text}
    if shown is None:
        return ipython_display.display(output, raw=True, display_id=True)
    shown.update(output, raw=True)
    return shown


def show(text: str, html: str = "", file: Any = None) -> None:
    """In a notebook, show ``html``. Elsewhere, or without ``html``, print ``text`` to ``file``, by default stdout."""
    if html and can_display():
        display(html, text)
    else:
        print(text, file=file, flush=True)


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table as HTML. The cells are escaped. Long text wraps, so the table fits the page."""
    head = "".join(f"<th {_HEAD}>{escape(each)}</th>" for each in header)
    lines = ["".join(f"<td {_CELL}>{escape(str(cell))}</td>" for cell in row) for row in rows]
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="max-width:100%">{top}<tbody>{body}</tbody></table>'
