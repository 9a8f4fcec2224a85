"""The folder in which the processes of a job report to the one that has started them; it is removed in every case."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

_SHELL = "/bin/sh"
_REMOVES = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'  # when its input ends, or says so
_LONGEST_SOCKET = 103  # characters of a socket's path on every system; Linux allows 107
_NAME_OF_SOCKET = len("/listener-12345678")


@contextmanager
def job_folder() -> Iterator[Path]:
    """Context with a new folder that only this user may enter.

    A shell waits beside this process, on a pipe that closes when this process ends, and then removes the folder: so it
    goes too when this process is killed. Where there is no shell, as on Windows, the folder stays then.
    """
    folder = Path(tempfile.gettempdir(), f"drivetrain-{secrets.token_hex(6)}")
    remover = _start_remover(folder)  # before there is anything to remove: this process may be killed at any moment
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if remover is not None:
            with suppress(OSError):  # it was killed
                remover.communicate(b"\n")


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
