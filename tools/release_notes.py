"""Print the section of CHANGELOG.md on one version, as the notes of its release: ``make notes VERSION=0.1.0``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes_of(version: str, changelog: str) -> str:
    """Return what CHANGELOG.md says about a version, without the heading that names it.

    Raises:
        ValueError: there is no such section, or it is empty.
    """
    found = {
        heading: body.strip()
        for heading, body in re.findall(r"^## \[(.*?)\].*?$(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    }
    if not found.get(version):
        raise ValueError(
            f"CHANGELOG.md says nothing under [{version}]; its sections are {', '.join(found)}. Give one of them, or "
            f"rename [Unreleased] to [{version}] - YYYY-MM-DD."
        )
    return found[version]


def main(*arguments: str) -> int:
    """Print the notes of the version that is named; return the exit code."""
    try:
        print(notes_of(*arguments, changelog=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
