"""Report why this rank fails: to the other ranks, through the job's store, and to the process that prints a report."""

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

_STORE_S = 2.0  # seconds that a failing rank waits for the store, whose process may have stopped


def report(error: BaseException, sheet: Sheet | None, summary: Callable[[Exception], str]) -> None:
    """Report why this rank fails: to the other ranks through the job's store, and in shared memory to the watching
    process.

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
    """Call ``exchange``, which uses the job's store, in a thread; wait only a few seconds for the result.

    So a store that does not answer cannot prevent a rank from ending.
    """

    def attempt() -> None:
        with suppress(RuntimeError):  # the store's process has ended
            exchange()

    thread = threading.Thread(target=attempt, name="drivetrain failure", daemon=True)
    thread.start()
    thread.join(_STORE_S)


def _tell_ranks(error: Exception, summary: Callable[[Exception], str]) -> None:
    """Send the reason of this failure to the other ranks. If ``error`` follows from another rank's failure, instead add
    that rank's reason to ``error``.

    A failing rank sends its reason first; only then does its process end or leave the group, and the exchanges of the
    other ranks break. A second call changes nothing.
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
    """Write the reason of this failure for the report, if this rank is watched and ``error`` is not a request to
    end.
    """
    failed_exit = isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and bool(error.code)
    if sheet is None or not (isinstance(error, Exception) or failed_exit):
        return
    with suppress(OSError):  # the launching process was killed, and the folder of the shared memory was removed
        if isinstance(error, Exception) and (text := _collective(error)):
            sheet.note_collective(text)
        child.write_failure(sheet.folder, sheet.local_rank, error)


def summary(error: BaseException, where: str) -> str:
    """Return a text for other ranks: which rank has failed, in which phase of the run, with which exception, in which
    line of the user's code.
    """
    place = place_of_user(error)
    lines = f"{type(error).__name__}: {text_of(error)}".splitlines()
    return f"Rank {dist.get_rank()} had failed, {where}: {lines[0]}{place and f', at {place}'}"


def _collective(error: Exception) -> str:
    """Return the collective in or after which this rank has failed; "" if torch has recorded none."""
    if waiting.store_of_job() is None:
        return ""
    with suppress(Exception):  # other versions of torch may raise anything; only the original error matters
        last = flight.last(json.loads(flight.taken()))
        if last is not None:
            return f"{'in' if child.follows(error) else 'after'} {last}"
    return ""
