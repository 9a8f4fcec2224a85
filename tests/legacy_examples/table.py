"""The table of the official examples in docs/legacy.md: what each is run with, and what comes of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "legacy.md"
GENERATION = {"1.0.8": "1.1", "1.1.0": "1.1", "1.3.8": "1.3"}
"""By version of Lightning, the generation that runs its programs."""


class Row(NamedTuple):
    """One example.

    Attributes:
        version: of Lightning, whose wheel contains it.
        path: below ``pl_examples``.
        options: what follows its name on the command line.
        result: "trains", "trains and tests", "does nothing ...", or a sentence with messages between backticks; a
            remark may follow a semicolon.
    """

    version: str
    path: str
    options: list[str]
    result: str

    @property
    def does(self) -> str:
        """What it does, without a remark on it."""
        return self.result.partition(";")[0]

    @property
    def messages(self) -> list[str]:
        """What the example prints when it stops, one of these."""
        return re.findall(r"`([^`]*)`", self.result)


def rows(version: str) -> list[Row]:
    """Return the rows of one version, in their order."""
    lines = re.findall(r"^\| (\d\.\d\.\d) \| `(.*?)` \| (.*?)\| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [
        Row(number, path, shlex.split(options.strip(" `")), result)
        for number, path, options, result in lines
        if number == version
    ]
