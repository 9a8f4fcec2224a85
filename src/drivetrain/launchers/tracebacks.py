"""Reduce tracebacks to the user's code: in reports, in notebooks, and when an uncaught exception ends a process.

The frames of libraries before the user's last frame are left out. If drivetrain raises the error, the frames after the
user's last frame are left out, too. The error's message then says what to do.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from drivetrain.errors import DrivetrainError

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (OURS, os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
_PACKAGES = ("site-packages", "dist-packages")  # folders of installed packages, which are inside Python's folder

_Print = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_FOLLOWS = "_follows_another_rank"  # an attribute that cut_completely() sets on an exception
_before: list[_Print] = []  # the previous sys.excepthook, after a call of cut_tracebacks()
_tell: list[Callable[[BaseException], object]] = []  # called with an uncaught exception before it is printed


def is_library(path: str) -> bool:
    """Return whether the file ``path`` belongs to drivetrain, torch or Python."""
    found = next((each for each in _NOT_THE_USERS if path.startswith(each + os.sep)), None)
    if found is None:
        return path.startswith("<frozen ")
    return found != _NOT_THE_USERS[-1] or not any(f"{os.sep}{each}{os.sep}" in path for each in _PACKAGES)


def cut_tracebacks(tell: Callable[[BaseException], object] | None = None) -> None:
    """From now on, print uncaught exceptions without the frames of libraries. Before an exception is printed, call
    ``tell`` with it.
    """
    if tell is not None:
        _tell[:] = [tell]
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _print_cut


def cut_completely(error: BaseException) -> None:
    """Let Python print ``error`` without any frame if ``error`` ends this process.

    Used for an error that another rank's failure has caused. The notes of the error describe that failure.
    """
    setattr(error, _FOLLOWS, True)


def traceback_of_user(error: BaseException) -> str:
    """Return the traceback of ``error`` as text. If drivetrain has raised ``error`` and no frame is the user's, return
    only the message.
    """
    text = traceback.TracebackException.from_exception(error)
    kept = _kept(error, [each.filename for each in text.stack])
    text.stack = traceback.StackSummary.from_list([text.stack[index] for index in kept])
    return "".join(text.format() if text.stack else text.format_exception_only())


def place_of_user(error: BaseException) -> str:
    """Return the file, line and function of the user's last frame in the traceback of ``error``, or ""."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not is_library(each.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _kept(error: BaseException, files: Sequence[str]) -> list[int]:
    """Return the indices of the frames to show. ``files`` has the file of each frame."""
    users = [index for index, file in enumerate(files) if not is_library(file)]
    if isinstance(error, DrivetrainError):
        return users
    return [*users, *range(users[-1] + 1, len(files))] if users else list(range(len(files)))


def _print_cut(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for tell in _tell:
        tell(error)
    complete: list[tuple[BaseException, TracebackType | None]] = []
    each: BaseException | None = error
    while each is not None and all(each is not seen for seen, _ in complete):
        complete.append((each, each.__traceback__))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    try:
        for one, _ in complete:
            one.__traceback__ = cut(one)
        _before[0](kind, error, error.__traceback__)
    finally:
        for one, found in complete:  # restore the complete tracebacks, for a debugger
            one.__traceback__ = found


def cut(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` without the frames of libraries before the user's last frame."""
    entries, trace = [], None if getattr(error, _FOLLOWS, False) else error.__traceback__
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    cut: TracebackType | None = None
    for index in reversed(_kept(error, [each.tb_frame.f_code.co_filename for each in entries])):
        cut = TracebackType(cut, entries[index].tb_frame, entries[index].tb_lasti, entries[index].tb_lineno)
    return cut
