"""Writes docs/errors.md from the texts of `drivetrain explain`, and gives new messages their codes.

A new message ends with ` [DT0000]`, and its entry in drivetrain/cli/messages.md begins with `## DT0000 Title`: this
program replaces both by the next free code. A code that the page has keeps its title and is never used again; when its
message is gone, its entry stays, and its title begins with "Retired: ".
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from drivetrain.cli.explain import FILE, NEW, PRELUDE, entries

PAGE = Path(__file__).parent / "errors.md"

HEAD = f"""\
# Messages with a code

Messages that people meet often end with a code, such as `[DT1042]`. `drivetrain explain DT1042` prints its entry: the
cause, an example, and the cure. A code keeps its meaning in all versions. `docs/make_errors.py` writes this page from
`drivetrain/cli/messages.md`, and tests run the examples. Each example begins with these lines:

```python
{PRELUDE}```
"""


def page() -> str:
    """The page's text."""
    text = FILE.read_text(encoding="utf-8")
    # the sections of the registry become sections of the page, and indented code becomes blocks of Python
    text = re.sub(r"^#", "##", text, flags=re.MULTILINE)
    return HEAD + "\n" + re.sub(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", _block, text, flags=re.MULTILINE)


def _block(lines: re.Match[str]) -> str:
    start = "\n" if lines[0].startswith("\n") else ""
    return f"{start}```python\n{textwrap.dedent(lines[0]).strip()}\n```\n"


def recorded(text: str) -> dict[str, str]:
    """The title of each code on a page."""
    return dict(re.findall(r"^#+ (DT\d{4}) (.*)$", text, re.MULTILINE))


def check_kept(old: str, new: str) -> None:
    """Check that every code of the old page has its title on the new one, or is retired there."""
    after = recorded(new)
    for code, title in recorded(old).items():
        if after.get(code) not in (title, f"Retired: {title.removeprefix('Retired: ')}"):
            raise SystemExit(
                f"{code} is {title!r} on the page, and {after.get(code)!r} now. Give a new message DT0000."
            )


def number_new(files: list[Path]) -> None:
    """Replace the code of a new message by the next free one."""
    if NEW in FILE.read_text(encoding="utf-8"):
        code = f"DT{max(int(entry.code[2:]) for entry in entries()) + 1}"
        for path in [FILE, *files]:
            text = path.read_text(encoding="utf-8")
            if f"[{NEW}]" in text or path == FILE:
                path.write_text(text.replace(NEW, code), encoding="utf-8")


if __name__ == "__main__":
    number_new([path for path in FILE.parent.parent.rglob("*.py") if path.name != "explain.py"])
    if PAGE.exists():
        check_kept(PAGE.read_text(encoding="utf-8"), page())
    PAGE.write_text(page(), encoding="utf-8")
