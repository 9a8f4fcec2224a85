"""What a run shows to other processes: its position to the launching process, and its failure to the other ranks."""

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
    """Context in which the loops publish their position for the launching process, and an exception is reported.

    If the strategy explains an exception, its explanation replaces the exception, also in reports.

    Args:
        progress: the progress of the run.
        saves: a callback saves after an exception, so the launching process gives this rank time for it.
        several: the run has several processes.
        explain: the strategy's method.
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
        sheet = own_sheet()  # watch() may have created a sheet for the run meanwhile
        explained = explain(error)
        said = explained or error
        failing.report(said, sheet, lambda failed: summary(failed, progress))
        if several:
            cut_tracebacks()
        if explained is not None:
            raise explained from None  # the explanation contains the cure, which the original's text would hide
        raise
    else:
        progress.slot[PHASE] = Phase.NONE  # the program after the run is not part of it
    finally:
        shown_in = progress.slot
        if shown_in is not own:
            own[:] = shown_in[: len(own)]
            if len(shown_in) > len(own):  # a sheet of the launching process
                shown_in[STALL] = 0
            progress.show_in(own)


def watch(trainer: Trainer) -> None:
    """Let another process watch this distributed run from now on, until :func:`shown` ends.

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
    """Context during whose block the launching process waits for this rank although another rank has failed."""
    sheet = own_sheet()
    if sheet is not None:
        sheet.words[SAVING] = 1
    try:
        yield
    finally:
        if sheet is not None:
            sheet.words[SAVING] = 0


def summary(error: BaseException, progress: Progress, during: str = "") -> str:
    """Return a text for other ranks: which rank has failed, in which phase, with which exception, in which line of user
    code.

    Args:
        error: the exception.
        progress: the progress of the run.
        during: the step of the set-up, if it is known.
    """
    name = phase_name(progress.phase)
    where = "before its first phase" if name == "none" else f"in the phase {name!r}"
    return failing.summary(error, where + (during and f" ({during})"))
