"""End a rank after its launching process was killed. Kill the DataLoader workers of a rank that was killed.

If a launching process is killed, the system sends SIGTERM to its ranks. Python handles this signal in the rank's main
thread, which may wait in a collective forever. A second thread of the rank therefore waits for the end of the launching
process. The second thread then gives the main thread some time, and kills the rank. While the launching process lives,
the second thread sleeps. This file works only on Linux.

This file is imported without torch.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENDS_S = 10.0  # a rank that has nothing to save must end within this many seconds
_POLL_S = 0.1
_WORKER = "pt_data_worker"  # torch's name for the workers of a DataLoader


class _Grace:
    """How long a rank may continue after its launching process has ended.

    Attributes:
        seconds: the time that the rank has.
        followed: the process id of the launching process if a thread waits for its end, otherwise 0.
    """

    seconds = _ENDS_S
    followed = 0


def follow(launcher: int) -> None:
    """Start a thread that ends this process soon after the parent process ``launcher`` has ended. Later calls have no
    effect.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open") or _Grace.followed == os.getppid():
        return
    if launcher != os.getppid():  # the launching process has ended, or this process is a child of a rank
        return
    try:
        end = os.pidfd_open(launcher)
    # The kernel is old, or the launching process has just ended. After its end, the system sends SIGTERM to this
    # process.
    except OSError:
        return
    _Grace.followed = launcher
    threading.Thread(target=_await, args=(end,), name="drivetrain launcher", daemon=True).start()


@contextmanager
def may_take(seconds: float) -> Iterator[None]:
    """Context that gives this process ``seconds`` to save and end, after its launching process has ended."""
    before, _Grace.seconds = _Grace.seconds, seconds
    try:
        yield
    finally:
        _Grace.seconds = before


def _await(end: int) -> None:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.poll()
    began = time.monotonic()
    # the loop reads _Grace.seconds again, because the main thread may enter the context of may_take()
    seconds = _Grace.seconds
    while time.monotonic() < began + max(seconds, _Grace.seconds):
        time.sleep(_POLL_S)
    with suppress(OSError):  # OSError: the terminal is closed
        os.write(
            2, f"The launching process was killed {seconds:g} s ago, so process {os.getpid()} ends too.\n".encode()
        )
    if os.getpgrp() == os.getpid():  # this process leads a group, which includes its children
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_workers(ranks: Collection[int]) -> None:
    """Kill the DataLoader workers of ranks that have ended. Does nothing if the system is not Linux.

    A worker that is reading a sample does not notice that its rank has ended. Reading may hang.

    Args:
        ranks: the process ids of the ranks. Each rank leads a session.
    """
    if sys.platform != "linux":
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # OSError: the process has just ended
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            session = int(rest.split()[3])
            if name == _WORKER and session in ranks:
                os.kill(int(folder.name), signal.SIGKILL)
