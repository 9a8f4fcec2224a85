"""Uncaught exceptions in a distributed program with an Engine: the failing rank informs the others and the report.

The Trainer does the same for its runs (trainer/shown.py). It adds nothing to a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from drivetrain.launchers.board import ENGINE, own_sheet
from drivetrain.launchers.tracebacks import cut_tracebacks
from drivetrain.strategies import failing, waiting


def begin() -> None:
    """Report the exception that ends this process, from this call on."""
    if (sheet := own_sheet()) is not None:
        sheet.words[ENGINE] = 1
    cut_tracebacks()
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _tell_and_print


@contextmanager
def told() -> Iterator[None]:
    """Context around a function that every rank runs; it reports an exception of that function."""
    waiting.begin_run()
    if (sheet := own_sheet()) is not None:
        sheet.forget_failure()
    try:
        yield
    except BaseException as error:
        _tell(error)
        raise


_Print = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_before: list[_Print] = []  # the previous sys.excepthook; empty until begin() is called


def _tell(error: BaseException) -> None:
    failing.report(error, own_sheet(), lambda failed: failing.summary(failed, "in a program on the Engine"))


def _tell_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        _tell(error)
    finally:
        _before[0](kind, error, trace)
