"""Create the folder in which a job's processes report. Remove the folder even if the launching process is killed."""

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
"""The name of a JSON file in each folder, and a key in this file. The value is true if the job's processes lock the
folder.
"""

_NAMES = re.compile(r"drivetrain-[a-z0-9_]{8,12}")
_SHELL = "/bin/sh"
# this shell program waits for a line or the end of its input, then removes the folder
_REMOVES = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'
_LONGEST_SOCKET = 103  # the most characters that a socket's path may have on every system; Linux allows 107
_NAME_OF_SOCKET = len("/listener-12345678")


@contextmanager
def job_folder() -> Iterator[Path]:
    """Context that yields a new folder, which only this user may enter, and removes it at the end.

    This process starts a shell that waits on a pipe. If this process is killed, the pipe closes, and the shell removes
    the folder. If the system has no shell, or if the shell is killed, too, the user's next job on this machine removes
    the folder.
    """
    sweep()
    folder = Path(tempfile.gettempdir(), f"drivetrain-{secrets.token_hex(6)}")
    held = None
    remover = _start_remover(folder)  # before mkdir, because this process may be killed at any time
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
    """Lock ``folder`` until this process and its forks have ended. Return the file descriptor that holds the lock.

    The lock shows :func:`sweep` that the job still runs. Process ids would not show this, because each container
    numbers its own processes. Some programs that clean temporary folders, such as systemd-tmpfiles, respect the lock,
    too.
    """
    if sys.platform == "win32":
        return None
    with suppress(OSError):  # OSError: the file system has no locks, and sweep() then removes no folder
        end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(end, fcntl.LOCK_SH)
        except OSError:
            os.close(end)
            raise
        return end
    return None


def sweep() -> None:
    """Remove the folders of this user's killed jobs. A job leaves its folder if the shell that removes the folder was
    also killed.

    SLURM, for example, kills all processes of a job before it requeues the job.
    """
    if sys.platform == "win32":
        return
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAMES.fullmatch(entry.name):
                # an exception means that the folder belongs to another user, is locked, or was just removed
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
        # a job writes this file only after it has locked the folder
        described = json.loads((folder / DESCRIPTION).read_text())
        if isinstance(described, dict) and described.get(HELD):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(end)


def _start_remover(folder: Path) -> subprocess.Popen[bytes] | None:
    if not os.path.exists(_SHELL):
        return None
    words = [_SHELL, "-c", _REMOVES, "drivetrain", str(folder)]
    # DEVNULL: otherwise the shell would keep this program's output open after this program's end
    nowhere: Any = subprocess.DEVNULL
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True
    )


def keep_sockets_in(folder: Path) -> None:
    """Let ``multiprocessing`` put temporary files into ``folder``, in this process and in its DataLoader workers.

    By default, a worker that sends tensors creates a temporary folder for a socket, and leaves this folder if the
    worker is killed.
    """
    config = getattr(current_process(), "_config", None)
    if isinstance(config, dict) and len(str(folder)) + _NAME_OF_SOCKET <= _LONGEST_SOCKET:
        config.setdefault("tempdir", str(folder))
