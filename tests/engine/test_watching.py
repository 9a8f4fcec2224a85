"""The Trainer and the Engine let a job be watched; tests/faults/test_hangs.py has the jobs."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.engine import watching
from drivetrain.launchers import board
from drivetrain.launchers.board import STALL, Board, join_board
from drivetrain.loops.progress import Progress
from drivetrain.trainer import shown

Watched = Callable[[float | None], None]


def run(tmp_path: Path, stall_timeout_s: float | None) -> Any:
    """What the watching needs of a Trainer."""
    settings = SimpleNamespace(stall_timeout_s=stall_timeout_s)
    names = {"log_dir": str(tmp_path), "default_root_dir": ""}
    strategy = SimpleNamespace(world=SimpleNamespace(store=None))
    plan = SimpleNamespace(environment=SimpleNamespace(creates_processes_externally=False))
    return SimpleNamespace(settings=settings, progress=Progress(), strategy=strategy, plan=plan, **names)


@pytest.fixture(params=["Trainer", "Engine"])
def watched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Call what the Trainer or the Engine calls when a job begins, with its ``stall_timeout_s``."""
    monkeypatch.setattr(atexit, "register", lambda *args: None)
    if request.param == "Trainer":
        return lambda stall_timeout_s: shown.watch(run(tmp_path, stall_timeout_s))
    monkeypatch.chdir(tmp_path)
    return lambda stall_timeout_s: watching.begin(
        run(tmp_path, None).strategy, False, lambda: tmp_path, stall_timeout_s
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a board that this process has joined."""
    monkeypatch.setattr(board, "_own", [])
    (tmp_path / "board").mkdir()
    Board(tmp_path / "board", [0], 1)
    join_board(tmp_path / "board", 0)
    return tmp_path / "board"


def test_a_rank_names_its_run_and_its_timeout(
    folder: Path, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching.stacks, "listen", lambda folder, local_rank: None)  # its thread would live on
    watched(5.0)
    found = Board.found(folder)
    assert found.words(0)[STALL] == 5000
    assert found.run_folder == str(tmp_path)


def test_a_board_that_was_removed_is_no_reason_for_a_run_to_fail(folder: Path, watched: Watched) -> None:
    """Its launching process was killed, or something cleans up temporary files in a long job."""
    shutil.rmtree(folder)
    watched(5.0)


@pytest.mark.parametrize("stall_timeout_s", [None, 0])
def test_without_a_timeout_nothing_is_watched(folder: Path, watched: Watched, stall_timeout_s: float | None) -> None:
    watched(stall_timeout_s)
    assert Board.found(folder).words(0)[STALL] == 0
    assert not (folder / "run").exists()


def test_the_board_has_a_sheet_for_each_device_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a strategy of one's own, which has no more than the contract."""
    monkeypatch.setattr(watching.watcher, "start", lambda folder: None)
    monkeypatch.setattr(board, "_own", [])
    strategy = SimpleNamespace(global_rank=2, local_rank=0, world_size=4, parallel_devices=["cpu", "cpu"])
    sheet = watching._make(strategy)
    try:
        assert list(Board.found(sheet.folder).ranks) == [2, 3]
    finally:
        shutil.rmtree(sheet.folder)
