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
from tests.conftest import _beside

from drivetrain.proof import command, runs


@dataclass
class Proof:
    """The exit code, the message, and the parts that differ first, each with its step."""

    code: int
    message: str
    differences: list[tuple[int, str, str]]
    continued_at: list[int | None]


@pytest.fixture(scope="session")
def zoo() -> types.ModuleType:
    return _beside("tests.proof.zoo", "proof", "zoo.py")


@pytest.fixture
def prove(
    programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> Iterator[Callable[..., Proof]]:
    """``prove(*words)``: run ``drivetrain prove-resume`` in an empty folder."""
    process = partial(_beside("tests.proof.copied", "proof", "copied.py").CopiedProcess, programs)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": process}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: str | Path) -> Proof:
        verdict = tmp_path / "verdict.json"
        code = command.main(["--folder", str(tmp_path / "runs"), "--json", str(verdict), *map(str, words)])
        found = json.loads(verdict.read_text())
        differences = [(step, part, detail) for step, part, detail, *_ in found["differences"]]
        return Proof(code, found["message"], differences, [after for _, after in found["kills"]])

    yield run
    capsys.readouterr()
