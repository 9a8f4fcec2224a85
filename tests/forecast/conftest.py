"""``drivetrain plan`` on a program that a test writes."""

from __future__ import annotations

import subprocess
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.forecast.planning import Said
from tests.proof.copied import CopiedProcess

from drivetrain.forecast.command import main
from drivetrain.proof import runs


@pytest.fixture
def plan(
    programs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:  # fmt: skip
    """``plan(program, *words)``: write the program into an empty folder, and run the command there."""
    process = partial(CopiedProcess, programs)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": process}))
    monkeypatch.chdir(tmp_path)

    def run(program: str | Path, *words: str) -> Said:
        path = program if isinstance(program, Path) else Path("train.py")
        if path is not program:
            path.write_text(str(program))
        code = main([*words, str(path)])
        assert not Path("after.txt").exists()
        return Said(code, *capsys.readouterr())

    return run
