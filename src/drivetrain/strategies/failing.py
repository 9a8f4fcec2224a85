"""Report why this rank fails. The other ranks read the reason from the job's store. The process that watches this rank
reads the reason from shared memory, and prints a report.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from drivetrain.base.rank_zero import log
from drivetrain.errors import PeerError, SIGTERMException, text_of
from drivetrain.launchers import child, flight
from drivetrain.launchers.board import Sheet
from drivetrain.launchers.tracebacks import cut_completely, place_of_user
from drivetrain.strategies import waiting

_STORE_S = 2.0  # seconds that a failing rank waits for the store; the process of the store may have stopped


def report(error: BaseException, sheet: Sheet | None, summary: Callable[[Exception], str]) -> None:
    """Report why this rank fails. Write the reason to the job's store, for the other ranks, and to ``sheet``, for the
    process that watches this rank.

    Args:
        error: the exception that ends this rank.
        sheet: this rank's part of the shared memory that the watching process reads; ``None``: no process watches this
            rank.
        summary: returns the text for the other ranks.
    """
    waiting.hurry()
    if isinstance(error, Exception):
        _tell_ranks(error, summary)
    _write_for_report(sheet, error)


def use_store(exchange: Callable[[], object]) -> None:
    """Call ``exchange``, which uses the job's store, in a thread. Wait at most a few seconds, so that this rank can end
    even if the store does not answer.
    """

    def attempt() -> None:
        with suppress(RuntimeError):  # the store's process has ended
            exchange()

    thread = threading.Thread(target=attempt, name="drivetrain failure", daemon=True)
    thread.start()
    thread.join(_STORE_S)


def _tell_ranks(error: Exception, summary: Callable[[Exception], str]) -> None:
    """Send the reason of this failure to the other ranks. If another rank's failure has caused ``error``, add the
    reason of the other rank to ``error`` instead.

    This function must run before the process leaves the group, because the other ranks read the reason as soon as their
    exchanges fail. A second call changes nothing.
    """
    store = waiting.store_of_job()
    if store is None or isinstance(error, PeerError):  # a PeerError already contains the other rank's reason
        return
    follows, found = child.follows(error), list[str]()

    def exchange() -> None:
        if follows:
            found.extend(waiting.failures(store, range(dist.get_world_size())))
        elif not waiting.has_announced(store):
            waiting.announce(store, summary(error))

    use_store(exchange)
    for text in list(found):
        if text in getattr(error, "__notes__", ()):
            continue
        if hasattr(error, "add_note"):
            error.add_note(text)
            cut_completely(error)
        else:
            log.error("%s", text)


def _write_for_report(sheet: Sheet | None, error: BaseException) -> None:
    """Write the reason of this failure for the report. Write nothing if no process watches this rank, or if ``error``
    is no failure, such as ``KeyboardInterrupt``.
    """
    failed_exit = isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and bool(error.code)
    if sheet is None or not (isinstance(error, Exception) or failed_exit):
        return
    with suppress(OSError):  # the launching process was killed, and the folder of the shared memory was removed
        if isinstance(error, Exception) and (text := _collective(error)):
            sheet.note_collective(text)
        child.write_failure(sheet.folder, sheet.local_rank, error)


def summary(error: BaseException, where: str) -> str:
    """Return a text with the failed rank, the phase of the run, the exception and the line of the user's code."""
    place = place_of_user(error)
    lines = f"{type(error).__name__}: {text_of(error)}".splitlines()
    return f"Rank {dist.get_rank()} had failed, {where}: {lines[0]}{place and f', at {place}'}"


def _collective(error: Exception) -> str:
    """Return the last collective of this rank before its failure, or "" if torch has recorded no collective."""
    if waiting.store_of_job() is None:
        return ""
    with suppress(Exception):  # in other versions of torch, these lines may raise any exception
        last = flight.last(json.loads(flight.taken()))
        if last is not None:
            return f"{'in' if child.follows(error) else 'after'} {last}"
    return ""
