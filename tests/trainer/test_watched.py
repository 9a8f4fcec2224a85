"""A run of several processes lets itself be watched; tests/faults/test_hangs.py has the jobs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.launchers import board
from drivetrain.launchers.board import STALL, Board, join_board
from drivetrain.loops.progress import Progress
from drivetrain.trainer import watched


def run(tmp_path: Path, stall_timeout_s: float | None) -> Any:
    """What the watching needs of a Trainer."""
    settings = SimpleNamespace(stall_timeout_s=stall_timeout_s)
    names = {"log_dir": str(tmp_path), "default_root_dir": ""}
    strategy = SimpleNamespace(world=SimpleNamespace(store=None))
    plan = SimpleNamespace(environment=SimpleNamespace(creates_processes_externally=False))
    return SimpleNamespace(settings=settings, progress=Progress(), strategy=strategy, plan=plan, **names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a board that this process has joined."""
    monkeypatch.setattr(board, "_own", [])
    (tmp_path / "board").mkdir()
    Board(tmp_path / "board", [0], 1)
    join_board(tmp_path / "board", 0)
    return tmp_path / "board"


def test_a_board_that_was_removed_is_no_reason_for_a_run_to_fail(folder: Path, tmp_path: Path) -> None:
    """Its launching process was killed, or something cleans up temporary files in a long job."""
    shutil.rmtree(folder)
    watched.begin(run(tmp_path, 5.0))


@pytest.mark.parametrize("stall_timeout_s", [None, 0])
def test_without_a_timeout_nothing_is_watched(folder: Path, tmp_path: Path, stall_timeout_s: float | None) -> None:
    watched.begin(run(tmp_path, stall_timeout_s))
    assert Board.found(folder).words(0)[STALL] == 0
    assert not (folder / "run").exists()
