"""Log messages and issue warnings once per job, not once per process."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from drivetrain.base.lazy import on_first_use

with on_first_use:
    from drivetrain.base import notebook

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("drivetrain")

# A launcher sets one of these variables, so the rank is known before the Trainer chooses a cluster environment.
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "_CONDOR_PROCNO",
)  # fmt: skip


def rank_from_environ(environ: Mapping[str, str] = os.environ) -> int:
    """Return the global rank in the environment variable that a launcher has set; 0 without a launcher."""
    for name in _RANK_VARIABLES:
        if (value := environ.get(name, "")).isdigit():
            return int(value)
    return 0


def tell_rank(rank: int | None = None) -> None:
    """Set the rank in the package lightning_utilities, because its ``rank_zero_only`` fails without a rank.

    Args:
        rank: this process's rank; ``None``: :func:`rank_from_environ`.
    """
    decorator = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    if decorator is not None:
        decorator.rank = rank_from_environ() if rank is None else rank


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate ``fn``: call ``fn`` on global rank 0, and return ``None`` on other ranks."""

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if rank_from_environ() == 0 else None

    return on_rank_zero


def any_rank_info(message: str, html: str = "") -> None:
    """Log ``message`` at INFO on the logger "drivetrain". By default the message appears on stderr. A notebook shows
    stderr in red. So in a notebook, the function displays ``html``, or ``message`` if ``html`` is empty.

    If the logger "drivetrain" or the root logger has a handler, only the handler gets the message. The logger's level
    and ``logging.disable`` can silence the message.
    """
    if log.hasHandlers():
        log.info(message)
    elif log.level <= logging.INFO and log.manager.disable < logging.INFO and not log.disabled:
        notebook.show(message, html, sys.stdout if notebook.can_display() else sys.stderr)


@rank_zero_only
def rank_zero_info(message: str, html: str = "") -> None:
    """Log ``message`` on rank 0 with :func:`any_rank_info`."""
    any_rank_info(message, html)


@rank_zero_only
def rank_zero_warn(
    message: str,
    category: type[Warning] = UserWarning,
    stacklevel: int | None = None,
    about: type | Callable[..., Any] | None = None,
) -> None:
    """On rank 0, issue a Python warning with the location of the user's code.

    Args:
        message: the text.
        category: the class of the warning.
        stacklevel: the number of calls up to the user's line, as in ``warnings.warn``; ``None``: find the innermost
            line outside drivetrain and torch.
        about: a user's class or function. The location is then the definition of this class or function.
    """
    if stacklevel is not None:
        warnings.warn(message, category, stacklevel=stacklevel)
        return
    file, line, module = _definition_of(about) or _line_outside(sys._getframe(1))
    registry = vars(sys.modules[module]).setdefault("__warningregistry__", {}) if module in sys.modules else None
    warnings.warn_explicit(message, category, file, line, module=module, registry=registry)


class LightningDeprecationWarning(DeprecationWarning):
    """A program for Lightning uses a feature that Lightning deprecates."""


def lightning_deprecation(message: str) -> bool:
    """In a program that runs with ``drivetrain.compat``, warn about a feature that Lightning deprecates.

    Returns:
        Whether the program runs with ``drivetrain.compat``.
    """
    written_for_it = any(type(finder).__name__ == "CompatFinder" for finder in sys.meta_path)
    if written_for_it:
        rank_zero_warn(message, LightningDeprecationWarning)
    return written_for_it


_INSIDE = frozenset({
    "drivetrain", "torch", "jsonargparse", "contextlib", "functools", "importlib", "threading", "multiprocessing",
})  # fmt: skip
"""Packages to skip in the search for the user's line."""

_Place = tuple[str, int, str]  # file, line, module


def _line_outside(frame: FrameType | None) -> _Place:
    """Return the innermost line outside the packages in :data:`_INSIDE`, or else the outermost line."""
    file, line, module = "drivetrain", 1, "drivetrain"
    while frame is not None:
        file, line, module = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _INSIDE and not file.startswith("<frozen "):
            break
        frame = frame.f_back
    return file, line, module


def _definition_of(thing: type | Callable[..., Any] | None) -> _Place | None:
    if thing is None:
        return None
    code = getattr(inspect.unwrap(thing), "__code__", None)
    if code is not None:
        return code.co_filename, code.co_firstlineno, thing.__module__
    try:
        file = inspect.getsourcefile(thing)
        return None if file is None else (file, inspect.getsourcelines(thing)[1], thing.__module__)
    except (OSError, TypeError):
        return None
