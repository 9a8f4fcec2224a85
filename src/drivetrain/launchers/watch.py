"""Detect that the ranks of a machine make no progress. Report which ranks wait and which are missing, and in some cases
end the job.

[Note: when a job that hangs is ended]
A job without progress is always reported. A job is ended only in two cases, in which it can never continue. First,
a rank has waited in a collective for the complete timeout, and no rank that is missing there can arrive. A rank cannot
arrive if it is dead, if it has been stopped for a while, or if it waits in another collective for ranks that cannot
arrive. Second, another rank of this machine is dead or has been stopped for a while, and a rank waits for it at the end
of a set-up phase. A rank that does something else may still arrive, because it may compile, save, prepare data, or be
in a debugger. Detection needs Linux, and torch's Flight Recorder must record the collectives.

A process that is not a rank reads shared memory and /proc about once a second. This process sends requests to the ranks
only after the timeout. This file is imported without torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.launchers import flight, stacks
from drivetrain.launchers.board import BATCHES, PHASE, SAVING, SHOWN, STALL, STEP, Board, say

_STOPPED_TIMEOUT_S = 60.0
_BUSY = 0.1  # a rank that uses a larger share of one processor is busy
_LOOK_S = 1.0  # seconds between two reads of the ranks' progress
_AGAIN_S = 10.0  # seconds between two requests while the ranks make no progress
_ENGINE_S = 60.0  # seconds between two requests for a program with an Engine, whose ranks show no progress


def stopped_timeout_s() -> float:
    """Return the number of seconds after which a stopped rank counts as dead. SIGSTOP or Ctrl-Z stops a rank (state T).

    The environment variable ``DRIVETRAIN_STOPPED_TIMEOUT_S`` overrides the default.
    """
    return float(os.environ.get("DRIVETRAIN_STOPPED_TIMEOUT_S", _STOPPED_TIMEOUT_S))


@dataclass(frozen=True)
class Seen:
    """What :class:`Watch` knows about a rank.

    Attributes:
        place: the rank's phase and step, as text.
        answer: the rank's answer to the last request.
        is_busy: whether the rank has used the processor recently.
        stopped_s: the number of seconds for which the rank has been stopped.
    """

    place: str
    answer: stacks.Answer
    is_busy: bool = False
    stopped_s: float = 0.0


class Watch:
    """Watches the ranks of one machine, and detects that they make no progress.

    Args:
        board: shows the progress of the job's ranks.
        say: prints a message.
        ask: returns the answers of local ranks, like :func:`drivetrain.launchers.stacks.ask`.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        board: Board,
        say: Callable[[str], None] = say,
        ask: Callable[[Board, Sequence[int]], list[stacks.Answer]] = stacks.ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._say, self._ask, self._clock = board, say, ask, clock
        self._local = range(len(board.ranks))
        self._next = self._since = clock()
        self._progress: tuple[tuple[int, ...], ...] = ()
        self._stopped: dict[int, float] = {}
        self._cpu: dict[int, tuple[float, float]] = {}
        self._asks_at, self._said = 0.0, False

    def look(self) -> str:
        """Check the ranks if the next check is due. Return the report on a job that must end, otherwise "".

        If there was no progress during the timeout, but the job may still continue, print a report once.
        """
        now = self._clock()
        if now < self._next:
            return ""
        words = [self._board.words(each) for each in self._local]
        stall_s = max(each[STALL] for each in words) / 1000
        if not stall_s:  # no rank is in a run that is watched
            self._next, self._progress = now + _LOOK_S, ()
            return ""
        look_s = min(_LOOK_S, stall_s / 10)
        self._next = now + look_s
        progress = tuple(tuple(each[word] for word in (PHASE, BATCHES, STEP, SAVING, STALL)) for each in words)
        if progress != self._progress:
            self._progress, self._since, self._said = progress, now, False
            # before this time, no rank can have waited in a collective for the whole timeout
            self._stopped, self._cpu, self._asks_at = {}, {}, now + stall_s + look_s
            return ""
        self._look_at_processes(now, now - self._since >= stall_s / 2)
        if now < self._asks_at:
            return ""
        runs = any(each[SHOWN] for each in words)  # False for a program with an Engine, whose ranks show no progress
        self._asks_at = now + min(_AGAIN_S if runs else _ENGINE_S, stall_s)
        return self._judge(now, stall_s, runs)

    def _look_at_processes(self, now: float, measures: bool) -> None:
        for each in self._local:
            pid = self._board.pid(each)
            process = stacks.process(pid) if pid else stacks.Process()
            if process.state == "T":
                self._stopped.setdefault(each, now)
            else:
                self._stopped.pop(each, None)
            if measures:
                self._cpu.setdefault(each, (now, process.cpu_s))

    def _judge(self, now: float, stall_s: float, runs: bool) -> str:
        seen: dict[int, Seen] = {}
        for each, answer in zip(self._local, self._ask(self._board, list(self._local)), strict=True):
            when, used_s = self._cpu.get(each, (now, 0.0))
            seen[self._board.ranks[each]] = Seen(
                self._board.place(each),
                answer,
                is_busy=when == now or answer.process.cpu_s - used_s > _BUSY * (now - when),
                stopped_s=now - self._stopped.get(each, now),
            )
        self._cpu = {}  # measured again from now on, because the answers themselves have used processor time
        ends = cannot_go_on(seen, stall_s)
        longest = max(
            (time.time() - waits.since for each in seen.values() if (waits := each.answer.waits_in)), default=0
        )
        self._said = self._said and (runs or longest >= stall_s)
        if not ends and (self._said or not (runs or longest >= stall_s)):
            return ""
        head = f"No rank has made progress for {now - self._since:.0f} s (stall_timeout_s={stall_s:g}). [DT1058]"
        if not runs:
            head = f"A rank has waited in a collective for {longest:.0f} s (stall_timeout_s={stall_s:g}). [DT1058]"
        foot = "The job is ended, because no rank can continue." if ends else "The job is not ended."
        text = "\n".join((head, *describe(seen), foot))
        text = "\n".join((text, _saved(self._board, text, seen)))
        self._said = True
        if ends:
            return text
        self._say(text)
        return ""


def now_of(board: Board) -> dict[int, Seen]:
    """Return what each rank of the board's machine does now."""
    answers = stacks.ask(board, range(len(board.ranks)))
    return {rank: Seen(board.place(each), answers[each]) for each, rank in enumerate(board.ranks)}


# ---- waiting and missing ranks ---------------------------------------------------------------------------------------


def missing(seen: Mapping[int, Seen]) -> dict[int, dict[int, str]]:
    """For each rank that waits in a collective, return a dictionary from the missing ranks to the reasons."""
    traces = {rank: each.answer.trace for rank, each in seen.items()}
    found: dict[int, dict[int, str]] = {}
    for rank, each in seen.items():
        waits, trace = each.answer.waits_in, each.answer.trace
        if waits is not None and trace is not None:
            found[rank] = flight.missing(waits, trace, traces)
    return found


def cannot_go_on(seen: Mapping[int, Seen], waited_s: float) -> bool:
    """Return whether a rank waits for ranks that cannot arrive. See [Note: when a job that hangs is ended] above.

    Args:
        seen: the ranks of this machine.
        waited_s: ranks that have waited for fewer seconds are ignored.
    """
    now = time.time()
    absent = missing(seen)
    stuck = set[int]()
    for rank in absent:
        waits = seen[rank].answer.waits_in
        if waits is not None and now - waits.since >= waited_s and not seen[rank].is_busy:
            stuck.add(rank)
    lost = {
        rank
        for rank, each in seen.items()
        if each.answer.process.is_dead or each.stopped_s >= stopped_timeout_s()
    }  # fmt: skip
    # at the end of a phase of the set-up, all ranks must meet
    if lost and any(each.answer.votes for each in seen.values()):
        return True
    while True:  # remove the ranks that wait for a rank which may still arrive
        left = {rank for rank in stuck if absent[rank] and absent[rank].keys() <= stuck | lost}
        if left == stuck:
            return bool(stuck)
        stuck = left


# ---- texts -----------------------------------------------------------------------------------------------------------


def text_of(seen: Mapping[int, Seen]) -> str:
    """Return a line for each rank, followed by the stacks of all ranks' threads."""
    return "\n".join((*describe(seen), "", _stacks(seen)))


def describe(seen: Mapping[int, Seen]) -> list[str]:
    """Return a line for each rank. If the rank waits in a collective, the line names the collective and the missing
    ranks. Otherwise, the line tells what the rank does.
    """
    absent = missing(seen)
    lacks = {other for others in absent.values() for other in others}
    voting = {rank for rank, each in seen.items() if each.answer.votes}
    if voting:
        lacks |= seen.keys() - voting
    gone = sorted(lacks - absent.keys())
    lines = [_described(rank, each, absent.get(rank, {})) for rank, each in seen.items()]
    if gone:
        lines.append(f"Missing: {', '.join(f'rank {rank}' for rank in gone)}.")
    return lines


def _described(rank: int, seen: Seen, absent: Mapping[int, str]) -> str:
    answer = seen.answer
    state, waits = answer.process.state, answer.waits_in
    name = f"Rank {rank} (process {answer.pid})" if answer.pid else f"Rank {rank}"
    where = seen.place + (answer.line and f", at {answer.line}")
    if waits is not None:
        others = "".join(f" Rank {other} {why}." for other, why in absent.items())
        return f"{name} waits in {waits}, for {max(0.0, time.time() - waits.since):.0f} s, {where}.{others}"
    if answer.votes:
        return f"{name} waits for the other ranks at the end of a phase of the set-up, {where}."
    if not answer.pid:
        return f"{name} has not begun a run, or runs in a container of its own."
    if answer.process.is_dead:
        return f"{name} has ended. It was {where}."
    if state == "T":
        since = f" for {seen.stopped_s:.0f} s" if seen.stopped_s else ""
        return f"{name} is stopped{since} (state T), {where}."
    if answer.process.traced or state == "t":
        return f"{name} is in a debugger, {where}."
    after = f" Its last one was {last}." if (last := flight.last(answer.trace)) is not None else ""
    silent = "" if answer.trace is not None else ", and does not answer"
    works = " and uses the processor" if seen.is_busy else ""
    return f"{name} waits in no collective{silent}{works}, {where}.{after}"


def _stacks(seen: Mapping[int, Seen]) -> str:
    return "\n".join(
        f"==== rank {rank} (process {each.answer.pid}) ====\n{each.answer.stacks.strip() or '(no answer)'}\n"
        for rank, each in seen.items()
    )


def _saved(board: Board, text: str, seen: Mapping[int, Seen]) -> str:
    """Write the report and all stacks to a file in the run's folder. Return a line with the file's path."""
    with contextlib.suppress(OSError):
        folder = Path(board.run_folder or board.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"stalled-{time.strftime('%Y%m%d-%H%M%S')}-rank{board.ranks[0]}.txt"
        path.write_text(f"{text}\n\n{_stacks(seen)}")
        return f"All stacks are in {path}."
    return _stacks(seen)
