"""A prover for tests: prove-resume in this process, whose programs are copies of a process that has imported torch."""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.proof.copied import CopiedProcess

from drivetrain.proof import command, runs


@dataclass
class Proof:
    """The exit code, the message, what differs first: step, part, detail, rank; and where the program continued."""

    code: int
    message: str
    differences: list[tuple[int, str, str, int]]
    continued_at: list[int | None]


@pytest.fixture
def copies(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command starts copies of one process in place of new interpreters."""
    process = partial(CopiedProcess, programs)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": process}))


@pytest.fixture
def prove(copies: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Iterator[Callable[..., Proof]]:
    """``prove(*words)``: run ``drivetrain prove-resume`` in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: str | Path) -> Proof:
        capsys.readouterr()
        code = command.main(["--folder", str(tmp_path / "runs"), "--json", *map(str, words)])
        found = json.loads(capsys.readouterr().out)
        differences = [tuple(each) for each in found["differences"]]
        return Proof(code, found["message"], differences, [after for _, after in found["kills"]])

    yield run
    capsys.readouterr()
