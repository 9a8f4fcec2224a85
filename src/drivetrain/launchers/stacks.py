"""Find out what the ranks of a machine do: the stacks of their threads, and the collectives in which they wait.

There are two methods. The first is a thread in each rank, which sleeps until a file name arrives through a named pipe.
The thread then writes the stacks and the trace of collectives to this file. The thread needs Python's global
interpreter lock (GIL), which a rank that waits in a collective has released. If other code holds the GIL, the thread
cannot answer. The second method is a signal, after which Python's faulthandler writes the stacks without the GIL. The
signal could crash a process in which other threads run Python. The signal is sent only if the first method fails,
because then one thread holds the GIL, and no other thread runs Python.

This file is imported without torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.base import files
from drivetrain.launchers import flight
from drivetrain.launchers.board import Board, own_sheet

_NUMBER = getattr(signal, "SIGRTMIN", 0) + 11  # the number of a signal that neither torch nor Python uses
_ANSWER_S = 1.0  # seconds for an answer through the pipe, and again for an answer to the signal
_SOON_S = 0.3  # seconds for an answer if the job is about to end
_SETTLED_S = 0.1  # stacks are complete if their file has not grown for this many seconds
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ASKED, _PIPE = "asked", "ask"
_BETWEEN = b"\n\0\n"  # the bytes between the stacks and the trace in an answer

_counter = itertools.count()


# ---- in the rank -----------------------------------------------------------------------------------------------------


def listen(folder: Path, local_rank: int) -> None:
    """Start to answer requests for this rank's stacks."""
    pipe = folder / f"{local_rank}.{_PIPE}"
    if sys.platform != "linux" or signal.getsignal(_NUMBER) is not signal.SIG_DFL or pipe.exists():
        return
    os.mkfifo(pipe, 0o600)
    stacks = open(folder / f"{local_rank}.{_ASKED}", "w")  # noqa: SIM115  open until the process ends
    _open.append(stacks)
    faulthandler.register(_NUMBER, stacks, all_threads=True)
    thread = threading.Thread(target=_answer, args=(pipe, folder, local_rank), name="drivetrain stacks", daemon=True)
    thread.start()


_open: list[object] = []


def _answer(pipe: Path, folder: Path, local_rank: int) -> None:
    # opened also for writing, because reading from a pipe without a writer returns at once
    with open(pipe, "r+b", buffering=0) as asks:
        while question := asks.read(64):
            for name in question.decode(errors="replace").split():
                with contextlib.suppress(OSError):  # OSError: the job has ended, and its folder was removed
                    _write_answer(folder / f"{local_rank}.{name}")


def _write_answer(path: Path) -> None:
    part = path.with_suffix(".part")
    with open(part, "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        try:
            trace = flight.taken()
        except Exception as error:  # another version of torch may raise any exception
            trace = json.dumps({"entries": [], "members": {}, "error": repr(error)}).encode()
        file.seek(0, os.SEEK_END)
        file.write(_BETWEEN + trace)
    files.move(part, path)


# ---- in the process that asks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """What the operating system knows about a process.

    Attributes:
        state: the letter of the process's state in Linux: "R" running, "S" waiting, "D" waiting for a disk, "T"
            stopped, "t" stopped by a debugger, "Z" ended. "" if the process does not exist, "?" on other systems.
        traced: whether a debugger is attached.
        cpu_s: the seconds of processor time that the process has used.
        answers: whether the process has a handler for the signal that asks for stacks. Without a handler, the signal
            would end the process.
    """

    state: str = "?"
    traced: bool = False
    cpu_s: float = 0.0
    answers: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self.state in ("", "Z", "X")


def process(pid: int) -> Process:
    """Return what the operating system knows about the process ``pid``."""
    if sys.platform != "linux":
        return Process()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Process(state="")
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return Process(
        state=stat[0],
        traced=int(status.get("TracerPid", "0")) != 0,
        cpu_s=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        answers=bool(int(status.get("SigCgt", "0"), 16) >> (_NUMBER - 1) & 1),
    )


def dead_ranks() -> list[int]:
    """Return the ranks of this machine that have ended. Called in a rank. If no process watches the ranks, return an
    empty list.
    """
    sheet = own_sheet()
    if sheet is None:
        return []
    try:
        board = Board.found(sheet.folder)
        pids = {rank: board.pid(each) for each, rank in enumerate(board.ranks)}
    except (OSError, ValueError):  # the watching process has ended, and the folder was removed
        return []
    return [rank for rank, pid in pids.items() if pid and process(pid).is_dead]


@dataclass(frozen=True)
class Answer:
    """The answer of one rank to :func:`ask`: what the rank does now.

    Attributes:
        pid: the rank's process id, or 0 if the rank has not begun or runs in another container.
        process: what the operating system knows about the rank's process.
        stacks: the stacks of the rank's threads, with the main thread's stack as the last. "" if the rank has not
            answered.
        trace: the trace of the rank's collectives, or ``None`` if the rank has not answered.
    """

    pid: int
    process: Process
    stacks: str = ""
    trace: flight.Trace | None = None

    @property
    def main(self) -> list[tuple[str, int, str]]:
        """File, line and function of each frame of the main thread, the innermost first."""
        thread = re.split(r"\n\n(?=(?:Current thread|Thread) )", self.stacks.strip())[-1]
        return [(file, int(line), name) for file, line, name in _FRAME.findall(thread)]

    @property
    def line(self) -> str:
        """The line that the main thread executes in the user's code. If the main thread executes no user code, this is
        the innermost line. "" if unknown.
        """
        # line 0 is generated code, which has no source
        own = [frame for frame in self.main if is_of_user(frame[0]) and frame[1]]
        return next((f"{file}:{line} in {name}" for file, line, name in own or self.main), "")

    @property
    def votes(self) -> bool:
        """Whether the main thread waits for the other ranks at the end of a set-up phase. The ranks meet there without
        a collective.
        """
        return any(file.endswith(_VOTES) and name == "_voting" for file, _, name in self.main[:2])

    @property
    def waits_in(self) -> flight.Collective | None:
        """The collective in which the main thread waits, or ``None`` if the main thread does something else.

        Even if a collective is unfinished, the main thread may do something else. The main thread waits only if its
        innermost line is torch's or drivetrain's.
        """
        waits = flight.waits_in(self.trace)
        inside = bool(self.main) and any(each in self.main[0][0] for each in _WAIT_IN)
        return waits if inside and self.process.state in ("S", "D") and not self.process.traced else None


_VOTES = os.path.join("drivetrain", "trainer", "votes.py")
_OURS = str(Path(__file__).parents[1]) + os.sep
_WAIT_IN = (*(f"{os.sep}torch{os.sep}{each}{os.sep}" for each in ("distributed", "autograd")), _OURS)
_NOT_THE_USERS = (
    _OURS,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
)


def is_of_user(path: str) -> bool:
    """Return whether the file ``path`` is user code. Files of Python and of installed packages are not."""
    installed = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return not (installed or path.startswith(("<frozen ", *_NOT_THE_USERS)))


def ask(board: Board, local_ranks: Sequence[int], answer_s: float = _ANSWER_S) -> list[Answer]:
    """Return what these ranks do now. If a rank is stopped or holds the GIL, the answer is incomplete.

    Args:
        board: shows the progress of the job's ranks.
        local_ranks: the ranks to ask.
        answer_s: the ranks have this many seconds to answer.
    """
    pids = {each: board.pid(each) for each in local_ranks}
    found = {each: process(pid) if pid else Process() for each, pid in pids.items()}
    name = f"{os.getpid()}-{next(_counter)}.answer"
    paths = {each: board.folder / f"{each}.{name}" for each in local_ranks}
    asked = [each for each in pids if found[each].answers and found[each].state not in ("T", "t")]
    asked = [each for each in asked if _write(board, each, name)]
    _wait(lambda: all(paths[each].exists() for each in asked), answer_s)
    silent = [each for each in asked if not paths[each].exists()]
    stacks = _signalled(board, {each: pids[each] for each in silent}, answer_s)
    answers = {each: _read(paths[each], stacks.get(each, "")) for each in pids}
    return [Answer(pids[each], found[each], *answers[each]) for each in pids]


def _wait(is_over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.01)


def _signalled(board: Board, pids: Mapping[int, int], answer_s: float) -> dict[int, str]:
    """Send the signal to these ranks, and return the stacks that faulthandler writes. The stacks of a rank that does
    not answer are "".
    """
    found, grew = dict.fromkeys(pids, b""), time.monotonic()
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # OSError: the job has ended
        written = {each: stack.enter_context(open(board.folder / f"{each}.{_ASKED}", "rb")) for each in pids}
        for each, pid in pids.items():
            written[each].seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):
                os.kill(pid, _NUMBER)

        def are_complete() -> bool:
            nonlocal grew
            for each, file in written.items():
                if new := file.read():
                    found[each], grew = found[each] + new, time.monotonic()
            return all(found.values()) and time.monotonic() - grew >= _SETTLED_S

        _wait(are_complete, answer_s)
    return {each: stacks.decode(errors="replace") for each, stacks in found.items()}


def note_collectives(board: Board, local_ranks: Sequence[int]) -> None:
    """Write for the report in which collectives these ranks wait. Call this function before the ranks are killed."""
    for each, answer in zip(local_ranks, ask(board, local_ranks, _SOON_S), strict=True):
        if (waits := flight.waits_in(answer.trace)) is not None:
            board.note_collective(each, f"in {waits}")


def _write(board: Board, local_rank: int, name: str) -> bool:
    path = board.folder / f"{local_rank}.{_PIPE}"
    with contextlib.suppress(OSError):  # OSError: the process has ended, or belongs to another user
        end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        with open(end, "wb", buffering=0) as pipe:
            return pipe.write(f"{name}\n".encode()) is not None  # None if the pipe is full
    return False


def _read(path: Path, stacks: str) -> tuple[str, flight.Trace | None]:
    """Return the stacks and the trace in the answer at ``path``. If there is no answer, return the argument ``stacks``
    and ``None``.
    """
    try:
        written, _, text = path.read_bytes().partition(_BETWEEN)
        trace: flight.Trace = json.loads(text)
    except (OSError, ValueError):
        return stacks, None
    path.unlink(missing_ok=True)
    return written.decode(errors="replace"), trace
