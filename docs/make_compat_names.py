"""Writes docs/compat_names.md: the original's public names beside the table of drivetrain.compat.

Run it after changing the table, or after adding a name to a folder that the table offers as a whole.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from drivetrain.compat import finder, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compat_names.md"
NAMES = ROOT / "tests" / "compat" / "public_names.json"

HEAD = f"""\
# Lightning's names in drivetrain.compat

Every public module of Lightning {table.VERSION} that has public names, how many of these names are available, and which
are not. In a module without a number, none is. [compat.md](compat.md) describes how programs written for Lightning run.
This page is written by `docs/make_compat_names.py` from `drivetrain/compat/table.py` and
`tests/compat/public_names.json`, and a test compares them.

| module | available | not available |
|---|---|---|
"""


def public_names() -> dict[str, list[str]]:
    """The original's public names by module path below ``lightning``."""
    found = json.loads(NAMES.read_text(encoding="utf-8"))
    return {path.partition(".")[2]: names for path, names in found.items()}


def is_served(path: str, name: str) -> bool:
    """Whether the table offers ``name`` in the module ``path``, and it is there."""
    found = finder.find(path, name) if path in table.SERVED else None
    return found is not None and hasattr(importlib.import_module(found[0]), found[1])


def page() -> str:
    """The page's text."""
    rows = []
    total = served = 0
    for path, names in public_names().items():
        if not names:
            continue
        missing = [name for name in names if not is_served(path, name)]
        there = len(names) - len(missing)
        total, served = total + len(names), served + there
        count = f"{there} of {len(names)}" if path in table.SERVED else ""
        module = f"lightning.{path}".rstrip(".")
        rows.append(f"| `{module}` | {count} | {' '.join(f'`{name}`' for name in missing)} |\n")
    return HEAD + "".join(rows) + f"\nIn all, {served} of {total} names.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
