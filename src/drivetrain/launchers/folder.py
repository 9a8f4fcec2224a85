"""The folder in which the processes of a job report to the one that has started them; it is removed in every case."""

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
"""The file in which a folder is described, and its entry which says that the processes of the job hold the folder."""

_NAMES = re.compile(r"drivetrain-[a-z0-9_]{8,12}")
_SHELL = "/bin/sh"
_REMOVES = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'  # when its input ends, or says so
_LONGEST_SOCKET = 103  # characters of a socket's path on every system; Linux allows 107
_NAME_OF_SOCKET = len("/listener-12345678")


@contextmanager
def job_folder() -> Iterator[Path]:
    """Context with a new folder that only this user may enter.

    A shell waits beside this process, on a pipe that closes when this process ends, and then removes the folder: so it
    goes too when this process is killed. Where there is no shell, as on Windows, the folder stays then. If the shell is
    killed as well, the next job of this user on this machine removes it.
    """
    sweep()
    folder = Path(tempfile.gettempdir(), f"drivetrain-{secrets.token_hex(6)}")
    held = None
    remover = _start_remover(folder)  # before there is anything to remove: this process may be killed at any moment
    try:
        folder.mkdir(mode=0o700)
        held = hold(folder)
        yield folder
    finally:
        if held is not None:
            os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
        if remover is not None:
            with suppress(OSError):  # it was killed
                remover.communicate(b"\n")


def hold(folder: Path) -> int | None:
    """Keep ``folder`` as long as this process lives, or a copy of it; return what to close to let it go.

    The lock tells :func:`sweep` that the job runs; it needs no numbers of processes, which other machines and
    containers have too. Cleaners of temporary folders that respect locks, such as systemd-tmpfiles, leave the folder
    alone.
    """
    if sys.platform == "win32":
        return None
    with suppress(OSError):  # a file system without locks: then no other process can take it either
        end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(end, fcntl.LOCK_SH)
        except OSError:
            os.close(end)
            raise
        return end
    return None


def sweep() -> None:
    """Remove the folders of this user's jobs in which every process was killed, also those that remove the folder.

    So ends a job whose cluster kills all that it has started, as when SLURM requeues it.
    """
    if sys.platform == "win32":
        return
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAMES.fullmatch(entry.name):
                with suppress(OSError, ValueError):  # it is another user's, it is held, or it has gone meanwhile
                    _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    if sys.platform == "win32":
        return
    end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(end).st_uid != os.geteuid():
            return
        fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
        described = json.loads((folder / DESCRIPTION).read_text())  # written when the folder is held already
        if isinstance(described, dict) and described.get(HELD):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(end)


def _start_remover(folder: Path) -> subprocess.Popen[bytes] | None:
    if not os.path.exists(_SHELL):
        return None
    words = [_SHELL, "-c", _REMOVES, "drivetrain", str(folder)]
    nowhere: Any = subprocess.DEVNULL  # the output of the program may be a pipe, whose reader waits for its end
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True
    )


def keep_sockets_in(folder: Path) -> None:
    """Let what ``multiprocessing`` makes for this process and its loaders' workers lie in ``folder``.

    A worker that sends tensors listens at a socket in a folder of its own, which stays when the worker is killed.
    """
    config = getattr(current_process(), "_config", None)
    if isinstance(config, dict) and len(str(folder)) + _NAME_OF_SOCKET <= _LONGEST_SOCKET:
        config.setdefault("tempdir", str(folder))
