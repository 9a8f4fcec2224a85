"""End a rank whose launching process was killed, and the DataLoader workers of a killed rank, even if they hang.

The system sends SIGTERM to a rank whose launching process was killed. During a run, Python handles the signal in the
main thread, which may wait in a collective forever. So another thread of the rank waits until the launching process
ends, then gives the main thread some time, and kills the rank. While the launching process lives, this thread sleeps.
All this is done only on Linux.

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

_ENDS_S = 10.0  # seconds in which a rank must end if it has nothing to save
_POLL_S = 0.1
_WORKER = "pt_data_worker"  # torch's name for the workers of a DataLoader


class _Grace:
    """How long this process may continue after the end of its launching process.

    Attributes:
        seconds: the time that this process has after the end of the launching process.
        followed: the id of the launching process, if a thread waits for its end; otherwise 0.
    """

    seconds = _ENDS_S
    followed = 0


def follow(launcher: int) -> None:
    """Start the thread that ends this process soon after its parent, the process ``launcher``. A second call has no
    effect.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open") or _Grace.followed == os.getppid():
        return
    if launcher != os.getppid():  # the launching process has ended, or this process is a child of a rank
        return
    try:
        end = os.pidfd_open(launcher)
    # the kernel is old, or the launching process has just ended; if it has, the system's SIGTERM ends this process
    except OSError:
        return
    _Grace.followed = launcher
    threading.Thread(target=_await, args=(end,), name="drivetrain launcher", daemon=True).start()


@contextmanager
def may_take(seconds: float) -> Iterator[None]:
    """Context in which this process may outlive its launching process by ``seconds``, because it must save."""
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
    # the loop reads the attribute again, because the run may enter or leave the context of may_take()
    seconds = _Grace.seconds
    while time.monotonic() < began + max(seconds, _Grace.seconds):
        time.sleep(_POLL_S)
    with suppress(OSError):  # OSError: the terminal is closed
        os.write(
            2, f"The launching process was killed {seconds:g} s ago, so process {os.getpid()} ends too.\n".encode()
        )
    if os.getpgrp() == os.getpid():  # this process leads a group, which includes the processes that it has started
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_workers(ranks: Collection[int]) -> None:
    """On Linux, kill the DataLoader workers of ranks that have ended.

    A worker ends itself soon after its rank, unless it is reading a sample, which may hang.

    Args:
        ranks: the process ids of the ranks, each of which leads a session.
    """
    if sys.platform != "linux":
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # OSError: the process has just ended
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            session = int(rest.split()[3])
            if name == _WORKER and session in ranks:
                os.kill(int(folder.name), signal.SIGKILL)
