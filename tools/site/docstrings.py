"""Docstrings as Markdown: Sphinx's roles, blocks after ``::``, arguments that share one description, texts in `reads`.

Griffe, which reads the docstrings for mkdocstrings, loads this file as an extension.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc|obj):`(?:~[\w.]*?(\w+)|([^`]+))`")
SHARED = re.compile(r"^( +)(\w+(?:,\s+\w+)+):(.*(?:\n\1 +.*)*)", re.MULTILINE)


def in_markdown(text: str) -> str:
    """Return a docstring as Markdown: ``:class:`~drivetrain.Trainer``` becomes `Trainer`.

    Of arguments that share a description, as in ``a, b: text``, each gets it.
    """
    text = re.sub(r"^ *::\n+", "", text, flags=re.MULTILINE)  # alone on its line, it only begins a block of code
    text = re.sub(r"::$", ":", ROLE.sub(lambda role: f"`{role[1] or role[2]}`", text), flags=re.MULTILINE)
    before, heading, items = re.match(r"(.*?)(^(?:Args|Attributes):\n|\Z)(.*)", text, re.DOTALL | re.MULTILINE).groups()
    return before + heading + SHARED.sub(each_alone, items)


def each_alone(item: re.Match[str]) -> str:
    """Return the lines of arguments that share a description, for each of them."""
    return "\n".join(f"{item[1]}{name}:{item[3]}" for name in re.split(r",\s+", item[2]))


def passed_to_reads(value: str) -> str | None:
    """Return the documentation in an attribute's value such as ``reads("engine.plan", "What was decided.")``."""
    if not value.startswith("reads("):
        return None
    call = ast.parse(value, mode="eval").body
    texts = [each.value for each in call.args[1:] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return texts[0] if texts else None


class Docstrings(griffe.Extension):
    """Rewrite each docstring as soon as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None and obj.is_attribute and (text := passed_to_reads(str(obj.value))):
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
