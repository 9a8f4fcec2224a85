"""A rank that fails tells why: the other ranks, through the job's store, and the process that prints the report."""

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
from drivetrain.launchers.tracebacks import place_of_user
from drivetrain.strategies import waiting

_STORE_S = 2.0  # that a rank which fails waits for the store: the process that holds it may have stopped


def report(error: BaseException, sheet: Sheet | None, summary: Callable[[Exception], str]) -> None:
    """Write why this rank fails: for the other ranks into the job's store, for the report onto the board.

    Args:
        error: why.
        sheet: this rank's part of the board; ``None``: no process watches this rank.
        summary: returns the text for the other ranks.
    """
    if isinstance(error, Exception):
        _tell_ranks(error, summary)
    _write_for_report(sheet, error)


def use_store(exchange: Callable[[], object]) -> None:
    """Call ``exchange``, which uses the job's store, in a thread that this rank awaits for a few seconds at most.

    So a store that does not answer keeps no rank from ending.
    """

    def attempt() -> None:
        with suppress(RuntimeError):  # the store is gone, with the process that held it
            exchange()

    thread = threading.Thread(target=attempt, name="drivetrain failure", daemon=True)
    thread.start()
    thread.join(_STORE_S)


def _tell_ranks(error: Exception, summary: Callable[[Exception], str]) -> None:
    """Tell the other ranks why this one fails; or, if its exchange broke, add to ``error`` what another has told.

    The other rank's connections break when its process ends or leaves the group, and it tells before that. A second
    call changes nothing.
    """
    store = waiting.store_of_job()
    if store is None or isinstance(error, PeerError):  # which says already what another has told
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
        else:
            log.error("%s", text)


def _write_for_report(sheet: Sheet | None, error: BaseException) -> None:
    """Write for the report why this rank fails, if it is watched, and ``error`` is no order to end."""
    if sheet is None or not (isinstance(error, Exception) or _is_failed_exit(error)):
        return
    with suppress(OSError):  # the launching process was killed, and the folder is gone with it
        if isinstance(error, Exception) and (text := _collective(error)):
            sheet.note_collective(text)
        child.write_failure(sheet.folder, sheet.local_rank, error)


def summary(error: BaseException, where: str) -> str:
    """Return which rank has failed, where, by what, and in which line of the user's code; for other ranks."""
    place = place_of_user(error)
    lines = f"{type(error).__name__}: {text_of(error)}".splitlines()
    return f"Rank {dist.get_rank()} had failed, {where}: {lines[0]}{place and f', at {place}'}"


def _collective(error: Exception) -> str:
    """Return in or after which collective this rank has failed; "" where torch has recorded none."""
    if waiting.store_of_job() is None:
        return ""
    with suppress(Exception):  # whatever another version of torch raises; the error itself is what matters
        last = flight.last(json.loads(flight.taken()))
        if last is not None:
            return f"{'in' if child.follows(error) else 'after'} {last}"
    return ""


def _is_failed_exit(error: BaseException) -> bool:
    """Return whether user code has called ``sys.exit`` with another code than 0."""
    return isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and bool(error.code)
