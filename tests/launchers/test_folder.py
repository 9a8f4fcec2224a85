"""The folder in which a job's processes report: it goes with the job, also when the launching process is killed."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from multiprocessing.process import current_process
from pathlib import Path

import psutil
import pytest

from drivetrain.launchers._folder import job_folder, keep_sockets_in

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
