"""Read files with sections of ``key = text`` lines, which are stored beside the code."""

from __future__ import annotations

from configparser import RawConfigParser
from pathlib import Path


class _Parser(RawConfigParser):
    optionxform = staticmethod(str)  # type: ignore[assignment]  # str: the parser must not change names to lower case


def tables(module: str, name: str) -> dict[str, dict[str, str]]:
    """Return each section of a file as a dictionary from keys to texts. The file ``name`` is in the folder of the file
    ``module``.
    """
    parser = _Parser(delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(Path(module).with_name(name).read_text(encoding="utf-8"))
    return {section: dict(parser[section]) for section in parser.sections()}
