"""Lightning's ``utilities.seed``: drivetrain's seeding functions with Lightning's signatures."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from drivetrain.base import seed as _seed
from drivetrain.compat.rank_zero import rank_zero_info

max_seed_value = 2**32 - 1
min_seed_value = 0


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Call :func:`drivetrain.seed_everything`. With ``verbose``, log the seed at INFO."""
    chosen = _seed.seed_everything(seed, workers)
    if verbose:
        rank_zero_info("Seed set to %d", chosen)
    return chosen


def reset_seed() -> None:
    """Call :func:`seed_everything` again with its last seed. Do nothing if it was never called."""
    if (seed := os.environ.get("PL_GLOBAL_SEED")) is not None:
        _seed.seed_everything(int(seed), workers=os.environ.get("PL_SEED_WORKERS", "0") == "1")


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Call :func:`drivetrain.base.seed.isolate_rng`; ``include_cuda`` has no effect."""
    return _seed.isolate_rng()


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a worker: the argument ``worker_init_fn`` of a DataLoader. The rank comes from environment variables, not
    from ``rank``.
    """
    _seed.worker_seed_init(worker_id)
