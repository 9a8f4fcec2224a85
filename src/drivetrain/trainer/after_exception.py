"""Save a fit that ends by an exception, with several ranks without an exchange between them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.errors import CheckpointError
from drivetrain.strategies.group import LoneGroup
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.checkpoint import dump
from drivetrain.trainer.rank_parts import own_part
from drivetrain.trainer.shown import saving

EARLIER = "-earlier"
"""Behind the name of a complete checkpoint that the one of a later exception has replaced."""


def save_after_exception(trainer: Any, path: str, base: str = "", weights_only: bool = False) -> str:
    """Save ``path`` when a fit ends by an exception; with several ranks without an exchange, which the dead would hang.

    Each rank writes what only it knows, under a name that follows from where it was; rank 0 lists the names that the
    others use if they were there too. A run that resumes finds out if one was elsewhere, or could not write.

    Args:
        trainer: of the fit.
        path: of the checkpoint.
        base: what the names of the other ranks' files begin with; "": ``path``.
        weights_only: leave out what only resuming needs.

    Returns:
        A sentence for the log.
    """
    strategy, run = trainer.strategy, trainer.current_run
    if strategy.world_size == 1 or run.ends_together:
        trainer.save_checkpoint(path, weights_only)
        return f"Saved {path}."
    if not _is_replica(strategy):
        return (
            f"{path} was not saved: {type(strategy).__name__} would need the state of the rank that has failed. "
            "The newest complete checkpoint stays."
        )
    with saving(), _alone(strategy):
        state = dump(trainer, weights_only)
        place = {} if weights_only else state["loops"]["drivetrain"]
        at = (run.token, *(place.get(name) for name in ("current_epoch", "batches_done", "global_step")))
        names = f"{base or path}.{zlib.crc32(repr(at).encode()):08x}.rank"
        store = strategy.checkpoint_io
        if strategy.is_global_zero:
            others = [] if weights_only else range(1, strategy.world_size)
            entries = [{"name": f"{os.path.basename(names)}{rank}"} for rank in others]
            _keep_earlier(store, path)
            store.save_checkpoint({**state, "rank_files": entries} if entries else state, path)
            wait_for(store, path)
        elif not weights_only:
            path = f"{names}{strategy.global_rank}"
            store.save_checkpoint(own_part(state), path)
            wait_for(store, path)
    return f"Saved {path}, each rank by itself."


def _keep_earlier(store: CheckpointIO, path: str) -> None:
    """Copy a complete checkpoint that is to be replaced: the new one may lack the part of a rank that has died.

    The earlier copy is replaced by it. One that is itself incomplete is not kept.
    """
    from drivetrain.strategies import rank_files  # here, so that importing the Trainer stays quick

    if not store.exists(path):
        return
    base, extension = os.path.splitext(path)
    kept = f"{base}{EARLIER}{extension}"
    try:
        listed = store.load_checkpoint(path).get("rank_files", ())
        folder = os.path.dirname(path)
        if all(store.exists(os.path.join(folder, each["name"])) for each in listed):
            rank_files.copy(store, path, kept)
            rank_zero_info(f"The earlier {path} is now {kept}.")
    except CheckpointError as error:  # it is damaged, or there is no room: the fit that fails now is saved all the same
        rank_zero_warn(f"The earlier {path} was not kept: {error}")


def _is_replica(strategy: Strategy) -> bool:
    """Return whether each rank has the whole model and the whole states of its optimizers."""
    from drivetrain.strategies.ddp import DDPStrategy  # here, so that importing the Trainer stays quick

    state = ("lightning_module_state_dict", "optimizer_state", "open_gradients", "save_checkpoint")
    if not isinstance(strategy, DDPStrategy) or any(overrides(strategy, name, DDPStrategy) for name in state):
        return False
    shards = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return not shards and strategy.data.size == strategy.world_size


@contextmanager
def _alone(strategy: Strategy) -> Iterator[None]:
    """Context in which this rank exchanges nothing with the others, one of which may be dead."""
    groups, lone = strategy._groups, LoneGroup(strategy.global_rank)
    strategy._groups = lone, lone
    try:
        yield
    finally:
        strategy._groups = groups
