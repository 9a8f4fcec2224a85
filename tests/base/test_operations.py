"""The line of the program that called an operation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from drivetrain.base import operations
from drivetrain.base.operations import innermost_line

TORCH = os.path.join(os.path.dirname(torch.__file__), "nn", "functional.py")


def test_the_innermost_line_below_the_working_directory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a package which is installed there, nor of text that was run."""
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "venv" / "site-packages" / "library.py"
    program = tmp_path / "train.py"
    program.write_text("a = 1\nb = a\n")
    places = [("<string>", 1), (operations.__file__, 1), (TORCH, 1), (str(installed), 7), (str(program), 2)]
    assert innermost_line([*places, (str(program), 1)]) == "train.py:2: b = a"
    assert innermost_line(places[:-1]) == f"{installed}:7: "
    assert innermost_line(places[:3]) is None


@pytest.mark.parametrize("where", ["torch", "root"])
def test_torch_is_not_the_program_where_it_lies_below_the_working_directory(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text("a = 1\n")
    monkeypatch.chdir(os.path.dirname(torch.__file__) if where == "torch" else os.sep)
    line = innermost_line([(TORCH, 1), ("/site-packages/library.py", 3), (str(program), 1)])
    assert line == (f"{str(program)[1:]}:1: a = 1" if where == "root" else "/site-packages/library.py:3: ")
