"""What the other ranks of a job learn of one that fails, where another launcher has started them."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launchers import board
from drivetrain.launchers.board import STALL, Board, join_board
from drivetrain.launchers.failure import read_failure
from drivetrain.loops.progress import Phase, Progress
from drivetrain.trainer.shown import shown

PROGRAM = Path(__file__).parents[1] / "faults" / "external_program.py"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
@pytest.mark.parametrize("where", ["set up", "batch start"])
def test_the_error_of_a_rank_whose_exchange_broke_names_the_rank_that_failed(
    programs: Any, tmp_path: Path, where: str
) -> None:
    done = programs.run(PROGRAM, where, 1, cwd=tmp_path, timeout=60)
    assert "the fault was injected" in done.stdout, done.stderr
    [own] = [line for line in done.stdout.splitlines() if line.startswith("on rank 1: ValueError; ")]
    [peer] = [line for line in done.stdout.splitlines() if line.startswith("on rank 0: ")]
    assert "had failed" not in own
    during = " (setup)" if where == "set up" else ""
    assert f"Rank 1 had failed, in the phase '{where}'{during}: ValueError: of this rank alone, at " in peer
    assert "external_program.py:" in peer


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
@pytest.mark.parametrize("rank", [0, 1] if os.environ.get("DRIVETRAIN_FAULTS") == "long" else [1])
def test_save_checkpoint_on_one_rank_alone_is_an_error_that_names_the_call(
    programs: Any, tmp_path: Path, rank: int
) -> None:
    """The other rank trains on, and waits in the exchange of the gradients."""
    done = programs.run(PROGRAM, "save", rank, cwd=tmp_path, timeout=60)
    assert "the fault was injected" in done.stdout, done.stderr
    [own] = [line for line in done.stdout.splitlines() if line.startswith(f"on rank {rank}: DrivetrainError; ")]
    waits = f"Rank {rank} waits in barrier('trainer.save_checkpoint'), in the phase 'batch end' after 3 batches "
    assert waits in own, done.stdout
    assert f"Rank {1 - rank} has continued without that call: it is in the phase " in own
    [peer] = [line for line in done.stdout.splitlines() if line.startswith(f"on rank {1 - rank}: ")]
    if rank == 1:  # rank 0 holds the store, in which it would be read
        assert f"Rank 1 had failed, in the phase 'batch end': DrivetrainError: {waits}" in peer
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
def test_the_program_without_a_fault_ends_well(programs: Any, tmp_path: Path) -> None:
    """The negative control."""
    done = programs.run(PROGRAM, "nowhere", 1, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout.count("no error")) == (0, 2), done.stderr


def test_a_report_is_about_the_run_that_failed_and_not_about_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may catch the first exception and train again."""
    monkeypatch.setattr(board, "_own", [])
    seen = Board(tmp_path, [0], 1)
    join_board(tmp_path, 0).words[STALL] = 1
    for word in ("first", "second"):
        with pytest.raises(ValueError, match=word), shown(Progress(), saves=False, several=False):
            raise ValueError(word)
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert "second" in failure.summary
    assert seen.words(0)[STALL] == 0  # between runs there is nothing to watch
    with shown(Progress(), saves=False, several=False):
        assert read_failure(tmp_path, 0) is None


class Unspeakable(Exception):
    """One of a user's whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("of __str__")


def test_an_exception_whose_text_fails_is_reported_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_own", [])
    Board(tmp_path, [0], 1)
    join_board(tmp_path, 0)
    with pytest.raises(Unspeakable), shown(Progress(), saves=False, several=False):
        raise Unspeakable
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert "Unspeakable" in failure.summary


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_program_does_after_a_run_is_in_none_of_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(board, "_own", [])
    seen, progress = Board(tmp_path, [0], 1), Progress()
    join_board(tmp_path, 0)
    with suppress(ValueError), shown(progress, saves=False, several=False):
        progress.enter(Phase.TRAIN_END)
        if fails:
            raise ValueError
    assert seen.left_its_run(0) == fails
    assert seen.place(0).startswith("in the phase 'train end', after" if fails else "outside of a run, after")


def test_a_job_is_watched_on_after_something_has_cleaned_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_own", [])
    folder = tmp_path / "board"
    folder.mkdir()
    seen, progress = Board(folder, [0], 1), Progress()
    join_board(folder, 0)
    with shown(progress, saves=False, several=False):
        shutil.rmtree(folder)
        progress.enter(Phase.FORWARD)
        assert "'forward'" in seen.place(0)
        assert seen.pid(0) == os.getpid()
