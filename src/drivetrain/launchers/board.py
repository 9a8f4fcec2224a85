"""The board consists of shared memory and files. Each rank shows there its progress to the process that watches the
ranks.

The training loops count their steps in integers in shared memory, so a step does no extra work. The files are in a
folder that only this user may enter. The launching process creates the folder before the ranks start, and removes the
folder after the ranks have ended. If another program has started the ranks, local rank 0 creates the folder and starts
a watching process, which removes the folder.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.base.supplied import supplied
from drivetrain.launchers.folder import DESCRIPTION, HELD, hold, keep_sockets_in

BOARD = "DRIVETRAIN_BOARD"
"""The environment variable with the path of the board's folder. A rank removes the variable after reading it, so that
programs that the rank starts do not inherit the variable.
"""

PHASE, BATCHES, STEP, STORING, SHOWN, SAVING, SAVES, STALL, PID, NAMESPACE, ENGINE = range(11)
"""Indices of the integers that a rank writes. PHASE: the phase of the run. BATCHES: how many batches have begun. STEP:
how many optimizer steps were made. STORING: how many saves the rank waits for. SHOWN: whether a run has begun. SAVING:
whether the rank saves because of a failure. SAVES: whether the rank would save after a failure. STALL: the milliseconds
without progress after which a report is printed, or 0 if the run has one process. PID: the process id. NAMESPACE: the
PID namespace. ENGINE: whether the program uses an Engine.
"""

FOLDER = "drivetrain-"
"""The first characters of the name of a board's folder."""

SAVE_BEGINS_S = 5.0
"""After another rank has failed, a rank has this many seconds to begin a save."""

_RUN = "run"
_WORDS = 16
_SIZE = 8 * _WORDS  # bytes


@supplied
def phase_name(number: int) -> str:
    """Return the name of the phase with this number."""
    return str(number)


class Sheet:
    """The part of the board to which one rank writes.

    Args:
        folder: the board's folder.
        local_rank: the local rank of this process.
    """

    def __init__(self, folder: Path, local_rank: int) -> None:
        self.folder, self.local_rank = folder, local_rank
        if (held := hold(folder)) is not None:
            weakref.finalize(self, os.close, held)
        with open(folder / f"{local_rank}.slot", "r+b") as file:
            self.words: Any = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")
        self.words[PID], self.words[NAMESPACE] = os.getpid(), _namespace()
        if not faulthandler.is_enabled():
            # The file stays open, because faulthandler writes the stacks to it if a signal kills this process.
            self._stacks = open(folder / f"{local_rank}.stacks", "w")  # noqa: SIM115  # a dying process writes
            faulthandler.enable(self._stacks)

    def forget_failure(self) -> None:
        """Remove the report of a failure in an earlier run. The program has caught the exception of this failure."""
        for kind in ("failure", "collective"):
            (self.folder / f"{self.local_rank}.{kind}").unlink(missing_ok=True)

    def note_run_folder(self, path: str) -> None:
        """Tell the watching process the path of the run's folder, which contains the logs."""
        (self.folder / _RUN).write_text(os.path.abspath(path))

    def note_collective(self, text: str) -> None:
        """Write ``text`` for the report. ``text`` is "in" or "after", and the collective in or after which this rank
        has failed.
        """
        (self.folder / f"{self.local_rank}.collective").write_text(text)


def _namespace() -> int:
    """Return the id of this process's PID namespace, or 0 if the system has none. Each container has a different
    namespace.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


_own: list[Sheet] = []  # the sheet of this process


def join_board(folder: Path, local_rank: int) -> Sheet:
    """Return a new :class:`Sheet` for this rank on the board that another process has created. After this call,
    :func:`own_sheet` returns the new sheet.
    """
    _own[:] = [Sheet(folder, local_rank)]
    return _own[0]


def leave_board() -> None:
    """Forget the :class:`Sheet` in a fork of a rank, because only the rank itself may write to the sheet."""
    os.environ.pop(BOARD, None)
    _own.clear()


def own_sheet() -> Sheet | None:
    """Return the :class:`Sheet` to which this rank writes, or ``None`` if there is no board."""
    folder = os.environ.pop(BOARD, "")
    if folder and "LOCAL_RANK" in os.environ:
        try:
            _own[:] = [Sheet(Path(folder), int(os.environ["LOCAL_RANK"]))]
        except (OSError, ValueError):  # the job has ended, and its folder was removed
            return None
        keep_sockets_in(Path(folder))
    return _own[0] if _own else None


def say(text: str) -> None:
    """Print a message to stderr, in the process that watches the ranks."""
    print(text, file=sys.stderr, flush=True)


class Board:
    """The board in the process that watches the ranks.

    Args:
        folder: an empty folder that this process has locked with ``hold``.
        ranks: the global ranks of this machine's processes.
        world_size: the number of processes in the job.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], world_size: int) -> None:
        self.folder, self.ranks, self.world_size, self.launcher = folder, ranks, world_size, os.getpid()
        for local_rank in range(len(ranks)):
            (folder / f"{local_rank}.slot").write_bytes(bytes(_SIZE))
        described = {"ranks": list(ranks), "world_size": world_size, "launcher": self.launcher, HELD: True}
        (folder / DESCRIPTION).write_text(json.dumps(described))
        self._slots = _mapped(folder, len(ranks))

    @classmethod
    def found(cls, folder: Path) -> Board:
        """Return the board that another process has created in ``folder``.

        Raises:
            OSError, ValueError: there is no board, or it is incomplete.
        """
        described = json.loads((folder / DESCRIPTION).read_text())
        board = cls.__new__(cls)
        board.folder, board.ranks = folder, described["ranks"]
        board.world_size, board.launcher = described["world_size"], described["launcher"]
        board._slots = _mapped(folder, len(board.ranks))
        return board

    @property
    def run_folder(self) -> str:
        """The path of the run's folder, which contains the logs. "" before the first run."""
        return self._text(_RUN)

    def words(self, local_rank: int) -> Sequence[int]:
        """Return the integers that a rank has written. This works even if the rank is dead or the folder was
        removed.
        """
        return tuple(self._slots[local_rank])

    def pid(self, local_rank: int) -> int:
        """Return the process id of a rank, or 0 if the rank has not begun or runs in another container."""
        words = self.words(local_rank)
        return words[PID] if words[NAMESPACE] == _namespace() else 0

    def any(self, word: int, local_ranks: Sequence[int]) -> bool:
        """Return whether the integer at index ``word`` is nonzero for any of ``local_ranks``."""
        return any(self.words(each)[word] for each in local_ranks)

    def place(self, local_rank: int) -> str:
        """Return in which phase and step a rank is, as the end of a sentence that begins with the rank's name."""
        words, collective = self.words(local_rank), self._text(f"{local_rank}.collective")
        collective = collective and f", {collective}"
        if not words[SHOWN]:
            return f"in a program on the Engine{collective}" if words[ENGINE] else "before its first run"
        where = f"in the phase {phase_name(words[PHASE])!r}" if words[PHASE] else "outside of a run"
        return f"{where}, after {words[BATCHES]} batches had begun, in step {words[STEP]}{collective}"

    def places(self, but: int | None = None) -> list[str]:
        """Return a line about the phase and the step of each rank, except the local rank ``but``."""
        return [f"Rank {rank} was {self.place(each)}." for each, rank in enumerate(self.ranks) if each != but]

    def left_its_run(self, local_rank: int) -> bool:
        """Return whether a rank has ended before its run ended."""
        words = self.words(local_rank)
        return bool(words[SHOWN] and words[PHASE])

    def note_collective(self, local_rank: int, text: str) -> None:
        """Write ``text`` for the report. ``text`` names the collective in which a rank waits."""
        (self.folder / f"{local_rank}.collective").write_text(text)

    def stacks(self, local_rank: int) -> str:
        """Return the stacks that a rank wrote when a signal such as SIGSEGV killed it, or "" if there are none."""
        return self._text(f"{local_rank}.stacks")

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(errors="replace")
        except OSError:  # no rank has written this file
            return ""

    def report(self, local_rank: int, pid: int, end: str, text: str) -> str:
        """Return the report on a job in which a rank has failed.

        Args:
            local_rank: the local rank that failed first.
            pid: the process id of this rank.
            end: how this process ended, as the continuation of a sentence that begins with the rank's name.
            text: the traceback of this rank, or "".
        """
        lines = [f"Rank {self.ranks[local_rank]} of {self.world_size} (process {pid}) {end} {self.place(local_rank)}."]
        lines += self.places(but=local_rank)
        lines += [each.rstrip() for each in (self.stacks(local_rank), text) if each]  # the last line is the error
        return "\n".join(lines)


def _mapped(folder: Path, count: int) -> list[memoryview]:
    slots = list[memoryview]()
    for local_rank in range(count):
        with open(folder / f"{local_rank}.slot", "rb") as file:
            slots.append(memoryview(mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)).cast("q"))
    return slots
