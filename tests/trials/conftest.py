"""``drivetrain advise`` in this process, whose trials are copies of a process that has imported torch."""

from __future__ import annotations

import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.proof.copied import CopiedProcess

from drivetrain.proof import runs
from drivetrain.trials.command import main


class Advice(NamedTuple):
    """The exit code, and what was printed to the standard output and to the standard error."""

    code: int
    out: str
    err: str


@pytest.fixture
def advise(
    programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Advice]]:  # fmt: skip
    """``advise(program, *words)``: write the program into an empty folder, and run the command there.

    Afterwards, nothing may be left of the trials.
    """
    process = partial(CopiedProcess, programs)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": process}))
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(program: str, *words: str) -> Advice:
        Path("train.py").write_text(program)
        code = main([*words, "train.py"])
        return Advice(code, *capsys.readouterr())

    yield run
    assert list(here.rglob("*")) == [here / "train.py"]
    assert list(temporary.iterdir()) == []
