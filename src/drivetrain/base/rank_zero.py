"""Messages once per job, not once per process."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("drivetrain")

# A launcher exports one of these before the first line of user code runs, so the rank is known even before any
# cluster environment has been chosen.
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "_CONDOR_PROCNO",
)  # fmt: skip


def rank_from_environ(environ: Mapping[str, str] = os.environ) -> int:
    """Global rank as the launcher exported it; 0 where no launcher did."""
    for name in _RANK_VARIABLES:
        if (value := environ.get(name, "")).isdigit():
            return int(value)
    return 0


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: call ``fn`` on global rank 0; elsewhere return ``None``."""

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if rank_from_environ() == 0 else None

    return on_rank_zero


@rank_zero_only
def rank_zero_info(message: str) -> None:
    """Log ``message`` at INFO on the logger named "drivetrain"; by default it appears on stderr.

    A program that sets up logging decides what becomes of it: as soon as that logger or the root logger has a handler,
    nothing is written here. Before, the level of the logger and ``logging.disable`` can silence it. Python does the
    same for warnings: it writes them to stderr while there is no handler.
    """
    if log.hasHandlers():
        log.info(message)
    elif log.level <= logging.INFO and log.manager.disable < logging.INFO and not log.disabled:
        print(message, file=sys.stderr, flush=True)


@rank_zero_only
def rank_zero_warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 4) -> None:
    """Issue a Python warning that points at the caller's caller."""
    warnings.warn(message, category, stacklevel=stacklevel)
