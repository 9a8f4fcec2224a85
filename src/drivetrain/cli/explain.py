"""The command ``drivetrain explain``: print the cause, an example and the cure of a message that ends with a code.

The texts are in messages.md beside this file, one entry per code. docs/make_errors.py generates docs/errors.md from
messages.md.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from drivetrain.errors import closest

FILE = Path(__file__).with_name("messages.md")
NEW = "DT0000"
"""Write this code in a new message and in its entry in :data:`FILE`. docs/make_errors.py replaces it by a free one."""

PRELUDE = FILE.with_name("templates").joinpath("example.txt").read_text(encoding="utf-8")
"""The first lines of every example."""


class Entry(NamedTuple):
    """The explanation of one code.

    Attributes:
        code: such as "DT1042".
        title: what happened, in a few words.
        body: cause, example and cure, as Markdown.
    """

    code: str
    title: str
    body: str

    @property
    def example(self) -> str:
        """A program that causes the message, without its first lines (:data:`PRELUDE`). It is "" if the message needs
        several processes.
        """
        lines = re.findall(r"^(?:    .*|)\n", self.body, re.MULTILINE)
        return textwrap.dedent("".join(lines)).strip("\n")


def entries() -> Iterator[Entry]:
    """Yield all entries, in the order of :data:`FILE`."""
    text = FILE.read_text(encoding="utf-8")
    for found in re.finditer(r"^## (DT\d{4}) (.*)\n((?:(?!#).*\n)*)", text, re.MULTILINE):
        yield Entry(found[1], found[2], found[3].strip("\n") + "\n")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Explain a message that ends with a code such as [DT1042]: its cause, an example, the cure."
    )
    made.add_argument("code", nargs="?", metavar="CODE", help="without it, all codes are listed")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain explain") -> int:
    """Print the entry of a code, or a list of all codes. Exit with code 2 if the code does not exist."""
    made = parser(prog)
    code: str | None = made.parse_args(arguments).code
    known = {entry.code: entry for entry in entries()}
    if code is None:
        for entry in known.values():
            print(f"{entry.code}  {entry.title}")
        return 0
    name = code.strip("[]").upper()
    name = f"DT{name}" if name.isdigit() else name
    if name not in known:
        close = closest(name, known)
        hint = f"Did you mean {close}? " if close else ""
        made.error(f"there is no code {code!r}. {hint}Without a code, {prog} lists all.")
    entry = known[name]
    print(f"{entry.code}: {entry.title}\n\n{entry.body}", end="")
    if entry.example:
        print("\nThe example begins with these lines:\n\n" + textwrap.indent(PRELUDE, "    "), end="")
    return 0
