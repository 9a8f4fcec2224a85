"""Writes docs/compat_names.md: the original's public names beside the table of drivetrain.compat.

Run it after changing the table, or after adding a name to a folder that the table offers as a whole.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from fnmatch import fnmatchcase
from pathlib import Path

from drivetrain.compat import finder, table

VERSION = table.LATEST.version

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compat_names.md"
NAMES = ROOT / "tests" / "compat" / "public_names.json"

HEAD = f"""\
# Lightning's names in drivetrain.compat

Every public module of Lightning {VERSION} that has public names, how many of these names are available, and which
are not. In a module without a number, none is. [compat.md](compat.md) describes how programs written for Lightning run.
This page is written by `docs/make_compat_names.py` from `drivetrain/compat/served.txt`,
`tests/compat/public_names.json` and the reasons in `docs/compat_differences.py`, and a test compares them.

| module | available | not available | why |
|---|---|---|---|
"""


def public_names() -> dict[str, list[str]]:
    """The original's public names by module path below ``lightning``."""
    found = json.loads(NAMES.read_text(encoding="utf-8"))
    return {path.partition(".")[2]: names for path, names in found.items()}


def is_served(path: str, name: str) -> bool:
    """Whether the table offers ``name`` in the module ``path``, and it is there."""
    found = finder.find(path, name) if path in table.LATEST.served else None
    return found is not None and hasattr(importlib.import_module(found[0]), found[1])


def reasons() -> dict[str, list[str]]:
    """Patterns of names below ``lightning`` by the reason why they are not available."""
    spec = importlib.util.spec_from_file_location("compat_differences", ROOT / "docs" / "compat_differences.py")
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    found: dict[str, list[str]] = {}
    for table_of_reasons in (written.ON_PURPOSE, written.NOT_HERE, written.NAMES):
        for why, names in table_of_reasons.items():
            found.setdefault(why, []).extend(names.split())
    return found


def reason(path: str, name: str, known: dict[str, list[str]]) -> str:
    """Why ``name`` of the module ``path`` is not available; "" if no reason is written."""
    about = f"{path}.{name}".lstrip(".")
    return next((why for why, patterns in known.items() if any(fnmatchcase(about, each) for each in patterns)), "")


def page() -> str:
    """The page's text."""
    rows, known = [], reasons()
    total = served = 0
    for path, names in public_names().items():
        if not names:
            continue
        missing = [name for name in names if not is_served(path, name)]
        there = len(names) - len(missing)
        total, served = total + len(names), served + there
        why = dict.fromkeys(reason(path, name, known) for name in missing)
        count = f"{there} of {len(names)}" if path in table.LATEST.served else ""
        module = f"lightning.{path}".rstrip(".")
        rows.append(f"| `{module}` | {count} | {' '.join(f'`{name}`' for name in missing)} | {' '.join(why)} |\n")
    return HEAD + "".join(rows) + f"\nIn all, {served} of {total} names.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
