"""The process that watches a machine's ranks if another program has started them, such as torchrun, srun or mpirun.

Local rank 0 starts this process. This process prints a report when a rank fails, and the reports of
:mod:`drivetrain.launchers.watch`. When all ranks have ended, for whatever reason, this process removes the board's
folder and ends. This process does not import torch.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from drivetrain.launchers.board import STALL, Board, say
from drivetrain.launchers.failure import read_failure
from drivetrain.launchers.folder import hold
from drivetrain.launchers.watch import Watch

_POLL_S = 0.25
_LAST_WORDS_S = 1.0  # after a rank has failed: seconds for the others to write their failures
_START = "import sys; sys.path.insert(0, {root!r}); from drivetrain.launchers.watcher import main; main({folder!r})"


def start(folder: Path) -> None:
    """Start the watching process, which prints to the rank's output. Called in a rank, only on Linux.

    The process begins in a session of its own, because torchrun and others end a rank by signals to the rank's whole
    process group.
    """
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-I", "-c", _START.format(root=root, folder=str(folder))]
    os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def main(folder: str) -> None:
    """Watch the ranks that show their progress in ``folder``, until all of them have ended."""
    _close_inherited()
    _ignore_signals()
    hold(Path(folder))  # keep the folder locked until this process ends
    board = Board.found(Path(folder))
    try:
        _Ranks(board).watch()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _close_inherited() -> None:
    """Close the file descriptors that this process has inherited from the rank that started it, except the rank's
    output.

    These descriptors include the rank's connections to other ranks. The connections must close when the rank ends,
    because otherwise the other ranks wait for it.
    """
    for end in map(int, os.listdir("/proc/self/fd")):
        if end > 2:
            with suppress(OSError):
                os.close(end)


def _ignore_signals() -> None:
    """Ignore signals from a terminal or a launcher, because this process ends when the ranks have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


class _Ranks:
    """The ranks of this machine, which are not children of this process.

    Args:
        board: shows the progress of the job's ranks; each rank that has joined has written its process id there.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        # by local rank: a file descriptor that is readable when the process has ended
        self._running: dict[int, int] = {}
        self._ended: list[int] = []  # local ranks in the order in which their end was detected
        self._watch = Watch(board)

    def watch(self) -> None:
        """Return when all ranks have ended."""
        reports_at = 0.0
        while True:
            self._find_new()
            if not self._running:
                break
            self._wait(_POLL_S)
            if not reports_at and self._failed():
                reports_at = time.monotonic() + _LAST_WORDS_S
            elif reports_at and time.monotonic() >= reports_at:
                break
            if text := self._watch.look():
                say(text)
                self._kill()
                return
        if failed := self._failed():
            say(self._report(failed))
        while self._running:  # the program that started the ranks ends those that still run
            self._wait()

    def _wait(self, seconds: float | None = None) -> None:
        """Wait until a rank ends, but at most ``seconds``."""
        for end in select.select(list(self._running.values()), [], [], seconds)[0]:
            rank = next(each for each, known in self._running.items() if known == end)
            os.close(self._running.pop(rank))
            self._ended.append(rank)

    def _find_new(self) -> None:
        for rank in set(range(len(self._board.ranks))) - self._running.keys() - set(self._ended):
            if pid := self._board.pid(rank):
                try:
                    self._running[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._ended.append(rank)

    def _failed(self) -> list[int]:
        """Return the local ranks that have ended with an exception, or that have ended without one during a run."""
        folder, board = self._board.folder, self._board
        return [each for each in self._ended if (folder / f"{each}.failure").exists() or board.words(each)[STALL]]

    def _report(self, failed: list[int]) -> str:
        failures = {each: found for each in failed if (found := read_failure(self._board.folder, each))}
        own = [each for each in failures if not failures[each].follows]
        silent = [each for each in failed if each not in failures]
        # every failure follows from another rank, which may be one that has ended without an error during its run
        if not own:
            silent += [each for each in self._ended if each not in failed and self._board.left_its_run(each)]
        if own or not silent:
            rank = min(own or failures, key=lambda each: failures[each].when)
            end, text = f"{failures[rank].summary}\nThat was", failures[rank].traceback
        else:
            rank, text = silent[0], ""
            end = "ended without an exception, perhaps killed,"
        return self._board.report(rank, self._board.pid(rank), end, text)

    def _kill(self) -> None:
        for end in self._running.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
        while self._running:
            self._wait()


def can_watch() -> bool:
    """Return whether this system supports the watching process, and the watching process can outlive this rank."""
    # Ray kills a rank together with the processes that it has started
    if "drivetrain.launchers._ray_actor" in sys.modules:
        return False
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)
