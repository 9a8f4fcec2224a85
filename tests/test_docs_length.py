"""How many words of prose the pages may have: a page that says more is cut, or its facts become a table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
GENERATED = {"arguments.md", "compat_members.md", "compat_names.md", "errors.md"}
"""Pages that programs beside them write from docstrings, tables and messages."""
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name not in GENERATED)
LONGEST = 1_500
ALL = 40_420


def words(page: str) -> int:
    """How many words of prose a page has: without blocks of code, rows of tables and comments."""
    prose = re.sub(r"^( *)```.*?^\1```$|^ *\|[^\n]*$|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    return len(prose.split())


def test_prose_is_counted_without_code_and_tables() -> None:
    blocks = "```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert words(f"# Two words\n\n{blocks}\n1. Three more words\n\n   ```\n   y\n   ```\n") == 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_can_be_read_at_once(page: Path) -> None:
    assert words(page.read_text(encoding="utf-8")) <= LONGEST


def test_the_pages_grow_no_further() -> None:
    sizes = {page.name: words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(sizes.values()) <= ALL, sorted(sizes.items(), key=lambda item: -item[1])[:10]
