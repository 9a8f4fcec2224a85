"""Edits at the positions of a syntax tree: everything else stays as it is, byte for byte."""

from __future__ import annotations

import codecs

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.legacy.migrate.program import migrate
from drivetrain.legacy.migrate.source import Source

PROGRAM = "import pytorch_lightning as pl  # ä\nx = 'ü'; t = pl.Trainer(gpus=0)\n"
MIGRATED = "import drivetrain as pl  # ä\nx = 'ü'; t = pl.Trainer(accelerator=\"cpu\")\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_newlines_and_encoding_stay(newline: str, encoding: str) -> None:
    first = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else ""
    before, after = ((first + text).replace("\n", newline).encode(encoding) for text in (PROGRAM, MIGRATED))
    assert migrate("train.py", before).content() == after
    assert (encoding == "utf-8-sig") is after.startswith(codecs.BOM_UTF8)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n\tif True:\n\t\treturn 1\n", "x = 1\x0c\ny = 2", "a = '''\r\nb'''\n", "", "\n\n",
        "x = 1  # \u2028 one line\ny = 2\n",
        "# type: ignore\ndef f(a):\n    # type: (int) -> str\n    return 'lightning'\n",
        "import os; from math import (\n    pi,  # round\n)\n",
    ],
)  # fmt: skip
def test_a_program_without_lightning_stays_as_it_is(text: str) -> None:
    source = migrate("train.py", text.encode())
    assert source.content() == text.encode()
    assert source.remarks == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = 1\nprint 'two'\n", "train.py:2: this is no Python 3"),
        (b"x = '\xff'\n", "train.py"),
        (b"# coding: nothing\n", "train.py"),
        (b"x = 1\x00\n", "train.py"),
    ],
)
def test_what_cannot_be_parsed_is_an_error_that_names_the_file(content: bytes, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        migrate("train.py", content)


def test_edits_inside_of_moved_text_are_kept() -> None:
    source = Source("one.py", b"f(a, b)\n")
    source.replace(2, 6, "[", (5, 6), ", ", (2, 3), "]")
    source.replace(2, 3, "first")
    source.replace(5, 6, "second")
    assert source.result() == "f([second, first])\n"


@pytest.mark.parametrize(
    ("doomed", "left"),
    [
        ({0}, "f(b,  # two\n  c)"), ({1}, "f(a, # two\n  c)"), ({2}, "f(a, b,  # two\n  )"),
        ({1, 2}, "f(a,  # two\n  )"), ({0, 1, 2}, "f(# two\n  )"),
    ],
)  # fmt: skip
def test_an_argument_goes_and_its_comment_stays(doomed: set[int], left: str) -> None:
    source = Source("one.py", b"f(a, b,  # two\n  c)")
    source.remove([(2, 3), (5, 6), (17, 18)], doomed)
    assert source.result() == left
    compile(left, "one.py", "exec")


def test_a_line_that_held_nothing_else_goes_too() -> None:
    source = Source("one.py", b"f(\n    a,\n    b,\n    c,\n)\n")
    source.remove([(7, 8), (14, 15), (21, 22)], {1})
    assert source.result() == "f(\n    a,\n    c,\n)\n"
