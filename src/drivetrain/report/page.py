"""A report as one HTML page, for light and dark screens and for phones. The page has no scripts and loads no other
files.
"""

from __future__ import annotations

import os
from pathlib import Path
from string import Template

from drivetrain.report import sections
from drivetrain.report.comparing import differences
from drivetrain.report.curves import text
from drivetrain.report.reading import Run

_FOLDER = Path(__file__).parent


def page(run: Run) -> str:
    """Return the report of one run."""
    body = [
        sections.verdict(run), sections.curves([run]), sections.values(run), sections.phases(run),
        sections.attempts(run), sections.checkpoints(run), sections.described(run),
    ]  # fmt: skip
    return _page(_name(run), run.folder, "".join(body))


def comparison(one: Run, other: Run) -> str:
    """Return the report of the differences between two runs."""
    heads = "".join(
        f"<div><h3>{letter}: {text(_name(run))}</h3><p class=sub>{text(run.folder)}</p>{sections.verdict(run)}"
        f"{sections.phases(run)}</div>"
        for letter, run in (("A", one), ("B", other))
    )
    found = differences(one, other)
    body = [
        sections.speed(found["Speed"]), f"<div class=two>{heads}</div>", sections.curves([one, other]),
        sections.compared(found),
    ]  # fmt: skip
    return _page(f"{_name(one)} and {_name(other)}", "what differs between two runs, A and B", "".join(body))


def _name(run: Run) -> str:
    return os.path.basename(os.path.abspath(run.folder))


def _page(title: str, sub: str, body: str) -> str:
    style = _FOLDER.joinpath("page.css").read_text(encoding="utf-8")
    frame = Template(_FOLDER.joinpath("page.html").read_text(encoding="utf-8"))
    return frame.substitute(title=text(title), sub=text(sub), style=style, body=body)
