"""Tables of texts that are files beside the code."""

from __future__ import annotations

from configparser import RawConfigParser
from pathlib import Path


class _Parser(RawConfigParser):
    optionxform = staticmethod(str)  # type: ignore[assignment]  # otherwise it would change names to lower case


def tables(module: str, name: str) -> dict[str, dict[str, str]]:
    """Return the sections of the file ``name`` beside the file ``module``, each a table from keys to texts."""
    parser = _Parser(delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(Path(module).with_name(name).read_text(encoding="utf-8"))
    return {section: dict(parser[section]) for section in parser.sections()}
