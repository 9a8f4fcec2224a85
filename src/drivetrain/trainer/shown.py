"""Shows the launching process what the loops are doing, and reports an exception of this rank to the other ranks."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.engine import watching
from drivetrain.launchers import orphan
from drivetrain.launchers.board import PHASE, SAVES, SAVING, SHOWN, STALL, Sheet, own_sheet
from drivetrain.launchers.launcher import LAUNCHER
from drivetrain.launchers.tracebacks import cut_tracebacks
from drivetrain.loops.progress import Phase, Progress, phase_name
from drivetrain.strategies import failing, waiting

Trainer = Any  # an import would be circular


@contextmanager
def shown(
    progress: Progress,
    saves: bool,
    several: bool,
    explain: Callable[[BaseException], Exception | None] = lambda error: None,
) -> Iterator[None]:
    """Context in which the launching process can see what the loops are doing. Exceptions inside the context are
    reported to this process and to the other ranks.

    If ``explain`` returns an exception, the returned exception is reported and raised in place of the original.

    Args:
        progress: the progress of the run.
        saves: whether a callback saves a checkpoint after an exception. If so, the launching process gives this rank
            time to save.
        several: whether the run has several processes.
        explain: the strategy's method that returns an exception with a better explanation, or ``None``.
    """
    if several:
        waiting.begin_run()
    own, sheet = progress.slot, own_sheet()
    if sheet is not None:
        orphan.follow(int(os.environ.get(LAUNCHER, "0")))
        sheet.forget_failure()
        sheet.words[SAVES], sheet.words[SAVING] = int(saves), 0
        _show(progress, sheet)
    try:
        yield
    except BaseException as error:
        sheet = own_sheet()  # watch() can have created the sheet inside this context
        explained = explain(error)
        said = explained or error
        failing.report(said, sheet, lambda failed: summary(failed, progress))
        if several:
            cut_tracebacks()
        if explained is not None:
            raise explained from None  # the text of the original exception would distract from what to change
        raise
    else:
        progress.slot[PHASE] = Phase.NONE  # the run is over, but the program continues
    finally:
        shown_in = progress.slot
        if shown_in is not own:
            own[:] = shown_in[: len(own)]
            # The longer array is shared with the process that watches the ranks. With 0, that process does not report
            # the end of this rank as a failure. When all ranks have 0, it no longer waits for progress.
            if len(shown_in) > len(own):
                shown_in[STALL] = 0
            progress.show_in(own)


def watch(trainer: Trainer) -> None:
    """Let another process watch this distributed run until the context :func:`shown` ends.

    See :mod:`drivetrain.launchers.watch` for the watching process.
    """
    elsewhere, stall_s = trainer.plan.environment.creates_processes_externally, trainer.settings.stall_timeout_s
    sheet = watching.begin(trainer.strategy, elsewhere, lambda: trainer.log_dir or trainer.default_root_dir, stall_s)
    if sheet is not None and trainer.progress.slot is not sheet.words:
        _show(trainer.progress, sheet)


def _show(progress: Progress, sheet: Sheet) -> None:
    words = sheet.words
    words[: len(progress.slot)] = array("q", progress.slot)
    words[SHOWN] = 1
    progress.show_in(words)


@contextmanager
def saving() -> Iterator[None]:
    """Context for a save of a checkpoint. The launching process waits for the end of the context, even if another rank
    has failed.
    """
    sheet = own_sheet()
    if sheet is not None:
        sheet.words[SAVING] = 1
    try:
        yield
    finally:
        if sheet is not None:
            sheet.words[SAVING] = 0


def summary(error: BaseException, progress: Progress, during: str = "") -> str:
    """Return a text for the other ranks: the rank that failed, the phase, the exception, and the line of user code.

    Args:
        error: the exception.
        progress: the progress of the run.
        during: the step of the set-up, if known.
    """
    name = phase_name(progress.phase)
    where = "before its first phase" if name == "none" else f"in the phase {name!r}"
    return failing.summary(error, where + (during and f" ({during})"))
