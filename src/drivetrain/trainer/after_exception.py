"""Saves a checkpoint of a fit that ends with an exception, without communication between ranks."""

from __future__ import annotations

import os
import zlib
from typing import Any

from drivetrain.base.rank_zero import any_rank_info
from drivetrain.checkpoints.io import wait_for
from drivetrain.errors import CheckpointError
from drivetrain.strategies import rank_files, sharded_files
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.checkpoint import dump
from drivetrain.trainer.rank_parts import own_part
from drivetrain.trainer.shown import saving


def save_after_exception(trainer: Any, path: str, weights_only: bool = False) -> str:
    """Save the checkpoint ``path`` when a fit ends with an exception. No rank calls a collective, because a dead rank
    would block the other ranks in the collective.

    Each rank writes its part of the checkpoint to a file beside ``path``. The name of this file depends on the rank's
    position in the fit. The first rank that finds the files of all other ranks writes ``path``. Until then, the
    previous checkpoint stays there.

    Args:
        trainer: the Trainer of the fit.
        path: the path of the checkpoint, equal on all ranks.
        weights_only: leave out the state that only a resumed fit needs.

    Returns:
        A sentence for the log.
    """
    strategy, run = trainer.strategy, trainer.current_run
    if strategy.world_size == 1 or run.stopping.ends_together:
        trainer.save_checkpoint(path, weights_only)
        return f"Saved {path}."
    with saving(), strategy.alone() as what:
        if not what:
            return (
                f"{path} was not saved: {type(strategy).__name__} would need the state of the rank that has failed. "
                "The newest complete checkpoint stays."
            )
        missing = (_save_shards if what == "shards" else _save_replica)(trainer, path, weights_only)
    how = "a folder into which each rank has written its shards" if what == "shards" else "each rank by itself"
    if missing:
        return (
            f"{path} is not complete yet: rank {strategy.global_rank} has written its part, and {missing} is missing. "
            "The last rank completes it; if one of them is dead, the newest complete checkpoint stays."
        )
    if strategy.global_rank != 0 and (what == "shards" or not weights_only):
        any_rank_info(f"Saved {path}, {how}.")  # on rank 0, the callback that saves logs the returned sentence
    return f"Saved {path}, {how}."


def _save_replica(trainer: Any, path: str, weights_only: bool) -> str:
    """Save the checkpoint ``path`` as a file. Each rank except rank 0 writes its own part to a file beside ``path``.
    Return the name of a missing file, or "" if no file is missing.
    """
    strategy, store = trainer.strategy, trainer.strategy.checkpoint_io
    state = dump(trainer, weights_only)
    if weights_only:
        if strategy.global_rank == 0:
            store.save_checkpoint(state, path)
            wait_for(store, path)
        return ""
    save_id = _place_of(trainer, state)
    begun, parts = rank_files.unfinished(path, save_id), _parts(strategy, path, save_id)
    if strategy.global_rank == 0:
        rank_files.remove_unfinished(store, path, begun)
        state["rank_files"] = [{"name": os.path.basename(part)} for part in parts]
    own = begun if strategy.global_rank == 0 else parts[strategy.global_rank - 1]
    store.save_checkpoint(state if strategy.global_rank == 0 else own_part(state), own)
    wait_for(store, own)
    missing = next((each for each in (*parts, begun) if not store.exists(each)), "")
    if missing:
        # If this rank's file is gone, another rank has completed the checkpoint.
        return "" if missing == own else missing
    try:
        rank_files.finish(store, begun, path)
    except (FileNotFoundError, CheckpointError):
        if store.exists(begun):
            raise
    rank_files.remove_others(store, path, set(map(os.path.basename, parts)))
    return ""


def _parts(strategy: Strategy, path: str, save_id: str) -> list[str]:
    """Return the paths of the rank files, from rank 1 on."""
    return [f"{path}.{save_id}.rank{rank}" for rank in range(1, strategy.world_size)]


def _save_shards(trainer: Any, path: str, weights_only: bool) -> str:
    """Save the checkpoint ``path`` as a folder with each rank's shards. Return the name of a missing file, or ""."""
    strategy, store = trainer.strategy, trainer.strategy.checkpoint_io
    state = dump(trainer, weights_only)
    save_id = _place_of(trainer, state)
    parts = [] if weights_only else _parts(strategy, path, save_id)
    if strategy.global_rank == 0:
        rank_files.remove_unfinished(store, path, rank_files.unfinished(path, save_id))
    elif parts:
        store.save_checkpoint(own_part(state), parts[strategy.global_rank - 1])
    if parts:
        state["rank_files"] = [{"name": os.path.basename(part)} for part in parts]
    if not (missing := sharded_files.save_alone(strategy, state, path, save_id)):
        rank_files.remove_others(store, path, set(map(os.path.basename, parts)))
    return missing


def _place_of(trainer: Any, state: dict[str, Any]) -> str:
    """Return a text of eight digits that is equal on all ranks if they are at the same position of this fit.

    If the run compares the ranks' states, the digits also depend on the state. Ranks with different states then cannot
    complete a checkpoint together.
    """
    place = state.get("loops", {}).get("drivetrain", {})
    counters = [place.get(name) for name in ("current_epoch", "batches_done", "global_step")]
    states = [observe() for observe in trainer.hooks.bind_observers("state_alone")]
    at = (trainer.current_run.kept.token, *counters, *states)
    return f"{zlib.crc32(repr(at).encode()):08x}"
