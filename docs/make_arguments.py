"""Writes docs/arguments.md from the list of Trainer arguments and the docstrings of two callbacks."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from drivetrain.base.introspect import shown_type
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.settings import Settings, doc_of

PAGE = Path(__file__).parent / "arguments.md"

HEAD = """\
# Arguments

All arguments of the Trainer are keyword-only. An argument whose feature does not exist yet accepts only its default;
any other value raises a `NotSupportedError`. This page is written by `docs/make_arguments.py` from the code, and a
test compares the two.

- [Trainer](#trainer)
- [ModelCheckpoint](#modelcheckpoint)
- [EarlyStopping](#earlystopping)
"""

TABLE = """
## {}

| argument | type | default | what it does |
|---|---|---|---|
"""


def of_trainer() -> str:
    """The Trainer's arguments, from its settings."""
    return TABLE.format("Trainer") + "".join(
        f"| `{field.name}` | `{escaped(shown_type(field.type))}` | `{field.default!r}` | {doc_of(field)} |\n"
        for field in dataclasses.fields(Settings)
    )


def of(cls: type) -> str:
    """The arguments of a class, from its signature and the part Args of its docstring."""
    [text] = re.findall(r"^Args:\n(.*?)^(?=\S)", inspect.getdoc(cls) or "", re.DOTALL | re.MULTILINE)
    docs = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", text, re.DOTALL | re.MULTILINE))
    rows = []
    for name, parameter in inspect.signature(cls).parameters.items():
        default = "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        doc = re.sub(r":class:`(\w+)`", r"`\1`", " ".join(docs[name].split()).replace("``", "`")).rstrip(".")
        rows.append(f"| `{name}` | `{escaped(shown_type(parameter.annotation))}` | {default} | {escaped(doc)} |\n")
    return TABLE.format(cls.__name__) + "".join(rows)


def escaped(text: str) -> str:
    """The text as a cell of a table."""
    return text.replace("|", "\\|")


def page() -> str:
    """The page's text."""
    return HEAD + of_trainer() + of(ModelCheckpoint) + of(EarlyStopping)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
