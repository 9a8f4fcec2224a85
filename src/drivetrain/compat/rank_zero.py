"""Functions of Lightning's ``utilities.rank_zero`` that :mod:`drivetrain.base.rank_zero` does not have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from drivetrain.base.rank_zero import _RANK_VARIABLES as RANK_VARIABLES
from drivetrain.base.rank_zero import LightningDeprecationWarning, any_rank_info, log, rank_from_environ, rank_zero_warn

P = ParamSpec("P")
R = TypeVar("R")


class _RankZeroOnly:
    """Decorator: run a function only on global rank 0, and return ``default`` on other ranks.

    A program can assign ``rank_zero_only.rank`` if no environment variable contains the rank.
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return rank_from_environ() if self._rank is None else self._rank

    @rank.setter
    def rank(self, value: int) -> None:
        self._rank = value

    def __call__(self, fn: Callable[P, R], default: Any = None) -> Callable[P, R]:
        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


def _get_rank() -> int | None:
    """Return the global rank that a launcher has set in environment variables; ``None`` without such a variable."""
    return rank_from_environ() if any(os.environ.get(name, "").isdigit() for name in RANK_VARIABLES) else None


@rank_zero_only
def rank_zero_debug(message: object, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log ``message % args`` at DEBUG on the logger named "drivetrain"."""
    log.debug(message, *args, **kwargs)


@rank_zero_only
def rank_zero_info(message: object, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log ``message % args`` at INFO on the logger named "drivetrain"; without a handler, write the text to stderr."""
    if log.hasHandlers():
        log.info(message, *args, **kwargs)
    else:
        any_rank_info(str(message) % args if args else str(message))


def rank_zero_deprecation(message: str, stacklevel: int | None = None, **_: Any) -> None:
    """Issue a :class:`LightningDeprecationWarning`."""
    rank_zero_warn(str(message), category=LightningDeprecationWarning, stacklevel=stacklevel)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return ``message``. If ``rank`` is not ``None``, put it in front."""
    return message if rank is None else f"[rank: {rank}] {message}"


class WarningCache(set[str]):
    """Warns about, or logs, each message only once."""

    def warn(self, message: str, stacklevel: int | None = None, **kwargs: Any) -> None:
        """Warn with ``message``, unless this object has already issued ``message``."""
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel, **kwargs)

    def deprecation(self, message: str, stacklevel: int | None = None, **_: Any) -> None:
        """Issue a deprecation warning with ``message``, unless this object has already issued ``message``."""
        if message not in self:
            self.add(message)
            rank_zero_deprecation(message, stacklevel=stacklevel)

    def info(self, message: str, stacklevel: int = 5, **_: Any) -> None:
        """Log ``message`` at INFO, unless this object has already issued ``message``."""
        if message not in self:
            self.add(message)
            rank_zero_info(message)
