"""The process that watches a machine's ranks if torchrun, srun, mpirun or another program has started them.

Local rank 0 starts this process. This process prints a report when a rank fails, and the reports of
:mod:`drivetrain.launchers.watch`. When all ranks have ended, this process removes the board's folder, and ends. This
process does not import torch.
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
_LAST_WORDS_S = 1.0  # after a rank has failed, the other ranks have this many seconds to write their failures
_START = "import sys; sys.path.insert(0, {root!r}); from drivetrain.launchers.watcher import main; main({folder!r})"


def start(folder: Path) -> None:
    """Start the watching process, which prints to this rank's output. Called in local rank 0, only on Linux.

    The process begins a new session, because programs such as torchrun end a rank by a signal to the rank's process
    group.
    """
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-I", "-c", _START.format(root=root, folder=str(folder))]
    os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def main(folder: str) -> None:
    """Watch the ranks that show their progress in ``folder`` until all ranks have ended."""
    _close_inherited()
    _ignore_signals()
    hold(Path(folder))  # keep the folder locked until this process ends
    board = Board.found(Path(folder))
    try:
        _Ranks(board).watch()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _close_inherited() -> None:
    """Close the file descriptors that this process has inherited from a rank, except the standard streams.

    For example, this process has inherited the rank's connections to other ranks. If these connections stayed open
    after the rank's end, the other ranks would wait for the rank.
    """
    for end in map(int, os.listdir("/proc/self/fd")):
        if end > 2:
            with suppress(OSError):
                os.close(end)


def _ignore_signals() -> None:
    """Ignore signals from a terminal or a launcher, because this process must outlive the ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


class _Ranks:
    """Waits for the ranks of this machine, which are not children of this process.

    Args:
        board: shows the progress of the ranks and their process ids.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        # for each running local rank, a file descriptor that becomes readable when the rank ends
        self._running: dict[int, int] = {}
        self._ended: list[int] = []  # the local ranks that have ended, in the order of detection
        self._watch = Watch(board)

    def watch(self) -> None:
        """Wait until all ranks have ended, and print reports on failures."""
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
        while self._running:  # the program that started the ranks will end the remaining ranks
            self._wait()

    def _wait(self, seconds: float | None = None) -> None:
        """Wait until a rank ends, at most ``seconds`` seconds."""
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
        """Return the local ranks that have ended with an exception, or before their run ended."""
        folder, board = self._board.folder, self._board
        return [each for each in self._ended if (folder / f"{each}.failure").exists() or board.words(each)[STALL]]

    def _report(self, failed: list[int]) -> str:
        failures = {each: found for each in failed if (found := read_failure(self._board.folder, each))}
        own = [each for each in failures if not failures[each].follows]
        silent = [each for each in failed if each not in failures]
        # Each of these failures follows from the end of another rank. That rank may have ended without an error before
        # its run ended.
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
    """Return whether this system supports a watching process that outlives the ranks."""
    # Ray kills the children of a rank together with the rank
    if "drivetrain.launchers._ray_actor" in sys.modules:
        return False
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)
