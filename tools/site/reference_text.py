"""The reference as Markdown, for llms-full.txt: each public name with its signature and docstrings, read by Griffe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pages

BLOCK = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)  # where mkdocstrings describes a name
UNBOUND = re.compile(r"\((?:self|cls)(?:, )?")


def texts(root: Path = pages.ROOT) -> dict[str, str]:
    """Return the pages of the reference by their paths, with the text that mkdocstrings shows on the site."""
    extensions = griffe.load_extensions(Path(__file__).with_name("docstrings.py"))
    package = griffe.load(pages.PACKAGE, search_paths=[root / "src"], extensions=extensions)
    return {path: filled(text, package) for path, text in pages.reference(root).items()}


def filled(text: str, package: Any) -> str:
    """Return a page with the description of a name in place of each block of mkdocstrings."""

    def description(block: re.Match[str]) -> str:
        path = block[1].partition(".")[2]
        found = package[path] if path else package
        return described(block[1], found, "inherited_members" in block[2])

    return BLOCK.sub(description, text)


def described(name: str, found: Any, inherited: bool) -> str:
    """Return the description of a module, a class with its members, or a function."""
    if found.is_module:
        return documented(found) + "\n"
    lines = [f"## {name}\n"]
    init = found.all_members.get("__init__") if found.is_class else found
    takes = "" if init is None else called(init).removeprefix("__init__")
    lines.append(f"```python\n{f'class {found.name}' if found.is_class else ''}{takes}\n```\n\n{documented(found)}\n")
    if found.is_class:
        listed = (f"- `{called(each)}`: {documented(each)}" for each in members(found, inherited))
        lines += [re.sub(r"\n(?=.)", "\n  ", each) for each in listed]
    return "\n".join(lines).rstrip() + "\n"


def members(found: Any, inherited: bool) -> Iterator[Any]:
    """Yield the public methods and attributes of a class that have a docstring."""
    for name, member in (found.all_members if inherited else found.members).items():
        if name[0] != "_" and not member.is_class and member.docstring:
            yield member


def documented(found: Any) -> str:
    """Return the docstring of an object, or ""."""
    return found.docstring.value.strip() if found.docstring else ""


def called(found: Any) -> str:
    """Return a function with its arguments as a program writes them; the name alone of anything else."""
    return UNBOUND.sub("(", found.signature(), count=1) if found.is_function else str(found.name)
