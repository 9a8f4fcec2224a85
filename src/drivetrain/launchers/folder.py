"""Create and remove the folder in which a job's processes report, even if the launching process is killed."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

DESCRIPTION, HELD = "board.json", "held"
"""The name of the file that describes a folder, and the file's entry that is true if the job's processes lock the
folder.
"""

_NAMES = re.compile(r"drivetrain-[a-z0-9_]{8,12}")
_SHELL = "/bin/sh"
# this shell program removes the folder after it has read a line, or the end of its input
_REMOVES = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'
_LONGEST_SOCKET = 103  # number of characters in a socket's path that every system supports; Linux allows 107
_NAME_OF_SOCKET = len("/listener-12345678")


@contextmanager
def job_folder() -> Iterator[Path]:
    """Context with a new folder that only this user may enter.

    This process starts a shell that waits on a pipe. When this process ends, even if it is killed, the pipe closes and
    the shell removes the folder. Without a shell, as on Windows, the folder stays if this process is killed. If the
    shell is also killed, this user's next job on this machine removes the folder.
    """
    sweep()
    folder = Path(tempfile.gettempdir(), f"drivetrain-{secrets.token_hex(6)}")
    held = None
    remover = _start_remover(folder)  # started before the folder exists, because this process may be killed at any time
    try:
        folder.mkdir(mode=0o700)
        held = hold(folder)
        yield folder
    finally:
        if held is not None:
            os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
        if remover is not None:
            with suppress(OSError):  # the shell was killed
                remover.communicate(b"\n")


def hold(folder: Path) -> int | None:
    """Lock ``folder`` while this process or a forked process lives; return the file descriptor that holds the lock.

    The lock shows :func:`sweep` that the job runs. Process ids cannot show this, because each machine and container has
    its own. Cleaners of temporary folders that respect locks, such as systemd-tmpfiles, do not remove the folder.
    """
    if sys.platform == "win32":
        return None
    with suppress(OSError):  # OSError: the file system has no locks, so no other process can lock the folder either
        end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(end, fcntl.LOCK_SH)
        except OSError:
            os.close(end)
            raise
        return end
    return None


def sweep() -> None:
    """Remove the folders that this user's killed jobs have left. A job leaves its folder if every process of the job
    was killed, including the shell that removes the folder.

    A cluster may kill all processes that a job has started, as SLURM does before it requeues the job.
    """
    if sys.platform == "win32":
        return
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAMES.fullmatch(entry.name):
                # an error means that the folder belongs to another user, is locked, or has just been removed
                with suppress(OSError, ValueError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    if sys.platform == "win32":
        return
    end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(end).st_uid != os.geteuid():
            return
        fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
        described = json.loads((folder / DESCRIPTION).read_text())  # written after the folder was locked
        if isinstance(described, dict) and described.get(HELD):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(end)


def _start_remover(folder: Path) -> subprocess.Popen[bytes] | None:
    if not os.path.exists(_SHELL):
        return None
    words = [_SHELL, "-c", _REMOVES, "drivetrain", str(folder)]
    # DEVNULL: a program that reads this program's output to the end must not wait for the shell
    nowhere: Any = subprocess.DEVNULL
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True
    )


def keep_sockets_in(folder: Path) -> None:
    """Let ``multiprocessing`` in this process and its DataLoader workers put temporary files into ``folder``.

    Otherwise, a worker that sends tensors has a socket in a folder of its own, which remains if the worker is killed.
    """
    config = getattr(current_process(), "_config", None)
    if isinstance(config, dict) and len(str(folder)) + _NAME_OF_SOCKET <= _LONGEST_SOCKET:
        config.setdefault("tempdir", str(folder))
