"""Let a waiting rank notice that another rank has failed or has continued without it. The waiting rank checks the job's
store at intervals.

A failing rank announces its failure in the store. A rank that waits for the failed rank, in an exchange or a save,
reads the announcement and raises an error. It does not wait for the end of the failed rank's process. During a fit, a
rank that waits in an exchange also asks the other ranks how many batches they have begun. A rank that has begun a later
batch has skipped the exchange. A thread of each rank answers these questions (loops/stop.py).
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from drivetrain.base import torch_private
from drivetrain.errors import DrivetrainError, PeerError, text_of

_FAILED = "drivetrain/failed"  # the key of the number of failed ranks, and the prefix of the announcements' keys
_ASKED = "drivetrain/where"  # the key of the number of questions, and the prefix of the answers' keys
_RUNS = "drivetrain/runs of rank"
_FIRST_LOOK_S, _LAST_LOOK_S = 1.0, 16.0  # the shortest and the longest pause between two checks

_MOST_FAILURES = 8  # the largest number of failures that a rank reads
_FILE_LOOK_S = 0.2  # the pause between two checks of a store in a file
_GRACE_S = 10.0  # seconds that the threads of a failing rank still wait for other ranks

_ABANDONED: list[Any] = []  # running exchanges and their groups: see _abandon


class _Here:
    """The state of this process in its job.

    Attributes:
        run: the number of distributed runs that this process has begun in this job; 0 before the processes are
            connected. With this number, failures of earlier runs can be ignored.
        place: a function that returns the number of batches that the fit has begun, and a text about the current
            position of the fit; ``None`` outside a fit.
        told: the store in which this process has announced its failure, and the key of the announcement.
        leaves: the time at which this process, after an exception, stops waiting for other ranks.
    """

    run = 0
    leaves = math.inf
    place: Callable[[], tuple[int, str]] | None = None
    told: tuple[Any, str] | None = None


def begin_run() -> None:
    """Begin a distributed run. Withdraw an earlier announcement of this rank, and ignore failures of earlier runs."""
    _Here.run, _Here.leaves = 0, math.inf
    number_run()
    if _Here.told is not None and _Here.told[0] is store_of_job():
        with suppress(RuntimeError):
            _Here.told[0].delete_key(_Here.told[1])
    _Here.told = None


def number_run() -> int:
    """Return the number of this run, or 0 if the processes are not connected yet. The number is the same on all
    ranks.
    """
    store = store_of_job()
    # the store counts the runs of this job, because this process may have been in other jobs
    if store is not None and not _Here.run:
        _Here.run = store.add(f"{_RUNS} {dist.get_rank()}", 1)
    return _Here.run


def announce(store: Any, text: str) -> None:
    """Announce in ``store`` that this rank has failed in this run. ``text`` describes the failure for other ranks."""
    _Here.told = store, f"{_FAILED}/{store.add(_FAILED, 1)}"
    store.set(_Here.told[1], f"{_Here.run}\n{dist.get_rank()}\n{text}")


def has_announced(store: Any) -> bool:
    """Return whether this rank has called :func:`announce` with ``store`` in this run."""
    return _Here.told is not None and _Here.told[0] is store


def hurry() -> None:
    """Limit the time that the threads of this process still wait for other ranks, because another rank may be dead."""
    _Here.leaves = min(_Here.leaves, time.monotonic() + _GRACE_S)


def wait_for_keys(store: Any, keys: Sequence[str], ranks: Sequence[int]) -> str:
    """Wait until the other ranks have set all ``keys`` in ``store``. Called in a thread.

    Args:
        store: a connection that only this thread uses.
        keys: the keys.
        ranks: the other ranks that set the keys.

    Returns:
        The reason why a key will not be set, or "" if all keys are set.
    """
    look_s = _FIRST_LOOK_S
    try:
        while not store.check(list(keys)):
            if failed := failures(store, ranks):
                return failed[0]
            if time.monotonic() > _Here.leaves:
                return "another rank does not answer"
            if isinstance(store, dist.FileStore):  # type: ignore[attr-defined]  # its wait() reads 100 times a second
                time.sleep(_FILE_LOOK_S)
                continue
            with suppress(RuntimeError):  # within ``look_s``, not all keys were set
                store.wait(list(keys), timedelta(seconds=look_s))
            look_s = min(2 * look_s, _LAST_LOOK_S, max(_FIRST_LOOK_S, _Here.leaves - time.monotonic()))
    except RuntimeError as error:  # the process that has the store has ended
        return f"the store of the job does not answer: {text_of(error)}"
    return ""


def failures(store: Any, ranks: Sequence[int]) -> list[str]:
    """Return the newest announcements of ``ranks`` from this run or a later run, in the order of ranks."""
    if not store.check([_FAILED]):
        return []
    found: dict[int, str] = {}
    for number in range(store.add(_FAILED, 0), 0, -1):
        if len(found) < _MOST_FAILURES and store.check([key := f"{_FAILED}/{number}"]):
            run, rank, text = store.get(key).decode().split("\n", 2)
            if int(run) >= _Here.run and int(rank) in ranks:
                found[int(rank)] = text
    return [text for _, text in sorted(found.items())]


def store_of_job() -> Any:
    """Return the store of the distributed job, or ``None`` without such a job."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() in ("mpi", "fake"):
        return None

    return torch_private.default_store() if dist.get_world_size() > 1 else None


# ---- an exchange -----------------------------------------------------------------------------------------------------


def finish(work: Any, group: Any, ranks: Sequence[int], what: str) -> None:
    """Wait until ``work`` is done.

    Args:
        work: a running exchange.
        group: the process group of the exchange.
        ranks: the members of the group.
        what: the name of the call, for the message.

    Raises:
        PeerError: a member has failed.
        DrivetrainError: a member has begun a later batch without this exchange.
    """
    look_s, question = _FIRST_LOOK_S, 0
    try:
        while not _is_done(work, look_s):
            store = store_of_job()
            others = [rank for rank in ranks if rank != dist.get_rank()]
            if store is None:
                continue
            if failed := failures(store, others):
                raise PeerError(f"Rank {dist.get_rank()} waited in {what}. {failed[0]}")
            if question:
                _check_places(store, question, others, what)
            if _Here.place is not None and threading.current_thread() is threading.main_thread():
                question = question or store.add(_ASKED, 1)
            look_s = min(2 * look_s, _LAST_LOOK_S)
    except BaseException:
        if not work.is_completed():
            _abandon(work, group)
        raise


def _is_done(work: Any, seconds: float) -> bool:
    """Return whether ``work`` is done within ``seconds``.

    Raises:
        RuntimeError: the exchange has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # the exchange has ended after the timeout; if it has failed, wait() raises its error
    return True


def _abandon(work: Any, group: Any) -> None:
    """Leave an exchange that other ranks may never join.

    torch destroys a process group only after the group's exchanges have ended. If Python freed the exchange or the
    group at exit, this process could therefore not end. Additional references keep the exchange and the group in
    memory. The connections of the group close when the process ends.
    """
    for each in (work, dist.group.WORLD if group is None else group):
        _ABANDONED.append(each)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


# ---- positions of other ranks ----------------------------------------------------------------------------------------


def show_place(place: Callable[[], tuple[int, str]] | None) -> None:
    """Let other ranks ask for the position of this rank. ``place`` returns the number of batches begun, and a
    description.
    """
    _Here.place = place


class Answers:
    """Answers other ranks that ask how many batches this rank has begun. Runs in a thread of the fit.

    Args:
        store: a connection that only this thread uses.
        rank: the rank of this process.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._answered = store, rank, 0

    def give(self) -> None:
        """Answer if a rank has asked since the last answer."""
        asked = self._store.add(_ASKED, 0)
        if asked != self._answered and _Here.place is not None:
            self._answered = asked
            batches, words = _Here.place()
            self._store.set(f"{_ASKED}/{self._rank}", f"{asked}\n{_Here.run}\n{batches}\n{words}")


def _check_places(store: Any, question: int, others: Sequence[int], what: str) -> None:
    """Check that no other rank has begun a later batch of this fit than this rank.

    Raises:
        DrivetrainError: another rank has begun a later batch.
    """
    if _Here.place is None:
        return
    batches, words = _Here.place()
    ranks = sorted([*others, dist.get_rank()])
    at = ranks.index(dist.get_rank())
    # Each rank compares its position only with its neighbours' positions. If some ranks wait and other ranks have
    # continued, two neighbours differ.
    for rank in {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {ranks[at]}:
        key = f"{_ASKED}/{rank}"
        if not store.check([key]):
            continue
        asked, run, theirs, there = store.get(key).decode().split("\n")
        if int(asked) >= question and int(run) == _Here.run and int(theirs) > batches:
            raise DrivetrainError(
                f"Rank {dist.get_rank()} waits in {what}, {words}. Rank {rank} has continued without that call: it is "
                f"{there}. Make this call on every rank, outside of conditions that differ between ranks. [DT1057]"
            )
