"""Publish a run's position for the launching process, and its failure for the other ranks."""

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

Trainer = Any  # not imported: the class's module imports this file


@contextmanager
def shown(
    progress: Progress,
    saves: bool,
    several: bool,
    explain: Callable[[BaseException], Exception | None] = lambda error: None,
) -> Iterator[None]:
    """Context in which the launching process can read the position of the loops. An exception in it is reported.

    If ``explain`` returns an exception, that exception is reported and raised in place of the original.

    Args:
        progress: the progress of the run.
        saves: whether a callback saves after an exception, so that the launching process must give this rank time to
            save.
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
        sheet = own_sheet()  # watch() may have created the sheet since the context began
        explained = explain(error)
        said = explained or error
        failing.report(said, sheet, lambda failed: summary(failed, progress))
        if several:
            cut_tracebacks()
        if explained is not None:
            raise explained from None  # without the original's text, which would hide the cure in the explanation
        raise
    else:
        progress.slot[PHASE] = Phase.NONE  # the run is over, but the program goes on
    finally:
        shown_in = progress.slot
        if shown_in is not own:
            own[:] = shown_in[: len(own)]
            if len(shown_in) > len(own):  # another process reads this slot
                shown_in[STALL] = 0
            progress.show_in(own)


def watch(trainer: Trainer) -> None:
    """Let another process watch this distributed run until the context :func:`shown` ends.

    :mod:`drivetrain.launchers.watch` describes what that process does.
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
    """Context in which the launching process waits for this rank to save, although another rank has failed."""
    sheet = own_sheet()
    if sheet is not None:
        sheet.words[SAVING] = 1
    try:
        yield
    finally:
        if sheet is not None:
            sheet.words[SAVING] = 0


def summary(error: BaseException, progress: Progress, during: str = "") -> str:
    """Return a text for the other ranks: which rank has failed, doing what, the exception, and the line of user code.

    Args:
        error: the exception.
        progress: the progress of the run.
        during: the step of the set-up, if it is known.
    """
    name = phase_name(progress.phase)
    where = "before its first phase" if name == "none" else f"in the phase {name!r}"
    return failing.summary(error, where + (during and f" ({during})"))
