"""The command ``drivetrain stacks``; tests/faults/test_hangs.py has one of a job that runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from drivetrain.cli.command import main
from drivetrain.launchers.board import FOLDER, Board, Sheet


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, in which are no other jobs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def job(boards: Path, name: str, run: Path) -> Board:
    """A job whose one rank is this process, which does not listen."""
    (boards / f"{FOLDER}{name}").mkdir()
    board = Board(boards / f"{FOLDER}{name}", [0], 1)
    Sheet(board.folder, 0).note_run_folder(str(run))
    return board


def test_a_job_is_found_by_its_folder_by_one_above_and_by_its_process(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(boards, "a", tmp_path / "logs" / "a")
    for name in (str(tmp_path / "logs" / "a"), str(tmp_path / "logs"), str(os.getpid())):
        assert main(["stacks", name]) == 0
        assert f"Rank 0 (process {os.getpid()}) waits in no collective, and does not answer" in capsys.readouterr().out


def test_the_same_for_programs(boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(boards, "a", tmp_path / "logs")
    assert main(["stacks", str(tmp_path), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["jobs"]
    assert found["run_folder"] == str(tmp_path / "logs")
    [rank] = found["ranks"]
    assert (rank["rank"], rank["pid"], rank["waits_in"], rank["missing"]) == (0, os.getpid(), None, {})


def test_a_job_that_is_not_there_is_an_error_that_names_those_that_are(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(boards, "a", tmp_path / "logs")
    assert main(["stacks", str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert f"no job writes to {tmp_path / 'other'}" in said
    assert f"Folders of running jobs: {tmp_path / 'logs'}." in said
    assert main(["stacks", "999999999"]) == 2
    assert "no job has the process 999999999" in capsys.readouterr().err


def test_what_an_ended_job_has_left_is_passed_over(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Board(boards, [0], 1)  # no rank has joined it
    (boards / f"{FOLDER}empty").mkdir()
    assert main(["stacks", str(tmp_path)]) == 2
    assert "Folders of running jobs: none" in capsys.readouterr().err
