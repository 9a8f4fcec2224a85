"""A run as the process that has started this rank sees it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.launchers import _child
from drivetrain.launchers.board import SAVES, SAVING, SHOWN, own_sheet
from drivetrain.loops.progress import Progress


@contextmanager
def shown(progress: Progress, saves: bool) -> Iterator[None]:
    """Context in which the loops write into memory that the launching process reads; it reports an exception there.

    Args:
        progress: of the run.
        saves: a callback saves after an exception, so the launching process gives this rank the time for it.
    """
    sheet = own_sheet()
    if sheet is None:
        yield
        return
    words = sheet.words
    words[: len(progress.slot)] = array("q", progress.slot)
    words[SHOWN], words[SAVES], words[SAVING] = 1, int(saves), 0
    own = progress.show_in(words)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            _child.write_failure(sheet.folder, sheet.local_rank, error)
        raise
    finally:
        own[:] = array("q", words[: len(own)])
        progress.show_in(own)


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
