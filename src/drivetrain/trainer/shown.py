"""A run as others see it: the process that has started this rank, and when it fails the other ranks."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from drivetrain.base.rank_zero import log
from drivetrain.errors import PeerError, SIGTERMException
from drivetrain.launchers import _child, flight, orphan
from drivetrain.launchers.board import SAVES, SAVING, SHOWN, STALL, own_sheet, place_of_user
from drivetrain.launchers.launcher import LAUNCHER
from drivetrain.loops.progress import Progress
from drivetrain.strategies import _waiting

_STORE_S = 2.0  # that a rank which fails waits for the store: the process that holds it may have stopped


@contextmanager
def shown(progress: Progress, saves: bool, several: bool) -> Iterator[None]:
    """Context in which the loops write into memory that the launching process reads; it reports an exception there.

    Args:
        progress: of the run.
        saves: a callback saves after an exception, so the launching process gives this rank the time for it.
        several: the run has several processes.
    """
    if several:
        _waiting.begin_run()
    own, sheet = progress.slot, own_sheet()
    if sheet is not None:
        orphan.follow(int(os.environ.get(LAUNCHER, "0")))
        sheet.forget_failure()
        words = sheet.words
        words[: len(own)] = array("q", own)
        words[SHOWN], words[SAVES], words[SAVING] = 1, int(saves), 0
        progress.show_in(words)
    try:
        yield
    except BaseException as error:
        sheet = own_sheet()  # a run that is watched may have joined one
        if isinstance(error, Exception):
            _share_failure(error, progress)
        if sheet is not None and (isinstance(error, Exception) or _is_failed_exit(error)):
            with suppress(OSError):  # the launching process was killed, and the folder is gone with it
                if isinstance(error, Exception) and (text := _collective(error)):
                    sheet.note_collective(text)
                _child.write_failure(sheet.folder, sheet.local_rank, error)
        raise
    finally:
        shown_in = progress.slot
        if shown_in is not own:
            own[:] = array("q", shown_in[: len(own)])
            shown_in[STALL] = 0
            progress.show_in(own)


def _collective(error: Exception) -> str:
    """Return in or after which collective this rank has failed; "" where torch has recorded none."""
    if _waiting.store_of_job() is None:
        return ""
    with suppress(Exception):  # whatever another version of torch raises; the error itself is what matters
        last = flight.last(json.loads(flight.taken()))
        if last is not None:
            return f"{'in' if _child.follows(error) else 'after'} {last}"
    return ""


@contextmanager
def saving() -> Iterator[None]:
    """Context in which the launching process waits for this rank, although another has failed."""
    sheet = own_sheet()
    if sheet is not None:
        sheet.words[SAVING] = 1
    try:
        yield
    finally:
        if sheet is not None:
            sheet.words[SAVING] = 0


def _is_failed_exit(error: BaseException) -> bool:
    """Return whether user code has called ``sys.exit`` with another code than 0."""
    return isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and bool(error.code)


def _share_failure(error: Exception, progress: Progress) -> None:
    """Tell the other ranks why this one fails; or, if its exchange broke, add to ``error`` what another has told.

    The other rank's connections break when its process ends or leaves the group, which is after it has told. What waits
    here is a thread, so that a store which does not answer keeps no rank from ending.
    """
    store = _waiting.store_of_job()
    if store is None or isinstance(error, PeerError):  # which says already what another has told
        return
    follows, found = _child.follows(error), list[str]()

    def exchange() -> None:
        with suppress(RuntimeError):  # the store is gone, with the process that held it
            if follows:
                found.extend(_waiting.failures(store, range(dist.get_world_size())))
            else:
                _waiting.announce(store, summary(error, progress))

    thread = threading.Thread(target=exchange, name="drivetrain failure", daemon=True)
    thread.start()
    thread.join(_STORE_S)
    for text in list(found):
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            log.error("%s", text)


def summary(error: BaseException, progress: Progress, during: str = "") -> str:
    """Return which rank has failed, in which phase, by what, and in which line of the user's code; for other ranks.

    Args:
        error: why.
        progress: of the run.
        during: the step of the set-up, if it is known.
    """
    name, place = progress.phase.name.lower().replace("_", " "), place_of_user(error)
    where = "before its first phase" if name == "none" else f"in the phase {name!r}"
    where += during and f" ({during})"
    lines = f"{type(error).__name__}: {error}".splitlines()
    return f"Rank {dist.get_rank()} had failed, {where}: {lines[0]}{place and f', at {place}'}"
