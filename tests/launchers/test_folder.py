"""The folder in which a job's processes report: it goes with the job, also when the launching process is killed."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import time
from multiprocessing.process import current_process
from pathlib import Path

import psutil
import pytest

from drivetrain.launchers.board import Board
from drivetrain.launchers.folder import job_folder, keep_sockets_in, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")


def test_the_folder_is_this_users_alone_and_goes_with_its_remover() -> None:
    before = {each.pid for each in psutil.Process().children()}
    with job_folder() as folder:
        (folder / "0.slot").write_bytes(b"")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        [remover] = [each for each in psutil.Process().children() if each.pid not in before]
    assert not folder.exists()
    assert not remover.is_running()


def test_it_is_removed_when_this_process_is_killed() -> None:
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        with job_folder() as folder:
            (folder / "0.slot").write_bytes(b"")
            os.write(writes, str(folder).encode())
            signal.pause()
    folder = Path(os.read(reads, 1000).decode())
    assert folder.exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reads)
    os.close(writes)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the remover is found in /proc")
def test_a_folder_whose_remover_was_killed_too_goes_with_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a cluster that kills all processes of a job. Nobody holds a folder then; a lock says who does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / "drivetrain-0123456789ab", tmp_path / "drivetrain-data"]  # what has no such description
    for each in others:
        each.mkdir()
    (others[1] / "board.json").write_text('{"held": true}')
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        with job_folder() as folder:
            Board(folder, [0], 1)
            [remover] = psutil.Process().children()
            os.write(writes, f"{folder} {remover.pid}".encode())
            signal.pause()
    path, number = os.read(reads, 1000).decode().split()
    sweep()
    assert Path(path).exists()  # the negative control: its process lives
    os.kill(int(number), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reads)
    os.close(writes)
    assert Path(path).exists()
    with job_folder() as folder:
        assert sorted(tmp_path.iterdir()) == sorted([*others, folder])


def test_a_folder_of_a_process_that_does_not_hold_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version of drivetrain holds none, and its job may run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "drivetrain-0123456789ab"
    folder.mkdir()
    (folder / "board.json").write_text('{"ranks": [0], "world_size": 1, "launcher": 1}')
    sweep()
    assert folder.exists()
    (folder / "board.json").write_text('{"ranks": [0], "world_size": 1, "launcher": 1, "held": true}')
    sweep()
    assert not folder.exists()


def test_sockets_of_workers_lie_in_the_folder_unless_their_path_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, str] = {}
    monkeypatch.setattr(current_process(), "_config", config)
    keep_sockets_in(tmp_path / ("x" * 100))
    assert config == {}
    keep_sockets_in(Path("/tmp/drivetrain-1"))
    assert config == {"tempdir": "/tmp/drivetrain-1"}
    keep_sockets_in(Path("/tmp/drivetrain-2"))  # what the user has chosen stays
    assert config == {"tempdir": "/tmp/drivetrain-1"}
