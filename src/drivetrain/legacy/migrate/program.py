"""Rewrites one program for drivetrain."""

from __future__ import annotations

import ast

from drivetrain.legacy.migrate.bindings import Bindings, Bound, Chain
from drivetrain.legacy.migrate.calls import rewrite_calls
from drivetrain.legacy.migrate.imports import Imports
from drivetrain.legacy.migrate.names import Names
from drivetrain.legacy.migrate.source import Source
from drivetrain.legacy.v1_3 import flags, hooks

EARLIER = "1.3"
"""The generation of a program written for Lightning 1, if the user names no generation."""


def migrate(name: str, content: bytes, generation: str = "") -> Source:
    """Return a :class:`Source` with the edits of the program and the remarks for the report.

    Args:
        name: the program's name in messages.
        content: the program's bytes.
        generation: the Lightning generation for which the program was written: "2", "1.3" or "1.1"; "": detect the
            generation.

    Raises:
        ConfigurationError: the program cannot be parsed.
    """
    source = Source(name, content)
    if not generation:
        generation = EARLIER if is_of_version_1(Bindings(source, Names())) else "2"
    bindings = Bindings(source, Names("" if generation == "2" else generation))
    bindings.is_of_version_1 = generation != "2"
    rewrite_calls(bindings)
    Imports(bindings).run()
    source.remarks.sort(key=lambda remark: (remark.line, remark.is_left, remark.text.startswith("differs: ")))
    return source


def is_of_version_1(bindings: Bindings) -> bool:
    """Whether a program uses an import, an argument or a hook that only earlier generations have."""
    used: list[Bound | Chain] = [*bindings.bound, *bindings.chains()]
    if any(bindings.names.is_only_earlier(each.module, each.name) for each in used):
        return True
    for node in ast.walk(bindings.source.tree):
        if isinstance(node, ast.Call) and (today := bindings.meaning(node.func)) is not None:
            arguments = {keyword.arg for keyword in node.keywords}
            if today.name == "Trainer" and arguments & (flags.FLAGS.keys() - flags.PRESENT):
                return True
        elif isinstance(node, ast.ClassDef) and _has_hook_of_that_time(bindings, node):
            return True
    return False


def _has_hook_of_that_time(bindings: Bindings, node: ast.ClassDef) -> bool:
    found = hooks.GONE.keys() & {getattr(each, "name", "") for each in node.body}
    return bool(found) and (bindings.is_a(node, "LightningModule") or bindings.is_a(node, "Callback"))
