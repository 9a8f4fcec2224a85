"""Writes docs/arguments.md from the one list of Trainer arguments. Run it after changing settings.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from drivetrain.base.introspect import shown_type
from drivetrain.settings import Settings, doc_of

PAGE = Path(__file__).parent / "arguments.md"

HEAD = """\
# The Trainer's arguments

All arguments are keyword-only. An argument whose feature does not exist yet accepts only its default; any other value
raises a `NotSupportedError`. This page is written by `docs/make_arguments.py` from `drivetrain/settings.py`, and a
test compares the two.

| argument | type | default | what it does |
|---|---|---|---|
"""


def page() -> str:
    """The page's text."""
    rows = []
    for field in dataclasses.fields(Settings):
        kind = shown_type(field.type).replace("|", "\\|")
        doc = doc_of(field)
        rows.append(f"| `{field.name}` | `{kind}` | `{field.default!r}` | {doc} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
