"""Save a fit that ends by an exception, with several ranks without an exchange between them."""

from __future__ import annotations

import dataclasses
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.base.introspect import defined_by_user, overrides
from drivetrain.base.rank_zero import any_rank_info, rank_zero_info, rank_zero_warn
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.errors import CheckpointError
from drivetrain.strategies.group import LoneGroup
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.checkpoint import dump
from drivetrain.trainer.rank_parts import own_part
from drivetrain.trainer.shown import saving


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
    if _is_sharded(strategy):
        return _save_shards(trainer, base or path, weights_only)
    if not _is_replica(strategy):
        return (
            f"{path} was not saved: {type(strategy).__name__} would need the state of the rank that has failed. "
            "The newest complete checkpoint stays."
        )
    with saving(), _alone(strategy):
        state = dump(trainer, weights_only)
        names = f"{base or path}.{_place_of(trainer, state)}.rank"
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


def _save_shards(trainer: Any, path: str, weights_only: bool) -> str:
    """Save ``path`` as a folder into which each rank writes its shards; it is complete when all ranks have."""
    from drivetrain.strategies import sharded_files  # here, because few runs need it

    strategy, store = trainer.strategy, trainer.strategy.checkpoint_io
    options = strategy.options
    strategy.options = dataclasses.replace(options, state_dict_type="sharded")
    try:
        with saving(), _alone(strategy):
            state = dump(trainer, weights_only)
            save_id = _place_of(trainer, state)
            names = f"{path}.{save_id}.rank"
            if not weights_only and not strategy.is_global_zero:
                store.save_checkpoint(own_part(state), f"{names}{strategy.global_rank}")
            entries = [{"name": f"{os.path.basename(names)}{rank}"} for rank in range(1, strategy.world_size)]
            state = state if weights_only else {**state, "rank_files": entries}
            is_complete = sharded_files.save_alone(strategy, state, path, save_id)
    finally:
        strategy.options = options
    if is_complete:
        text = f"Saved {path}, a folder into which each rank has written its shards."
        if not strategy.is_global_zero:
            any_rank_info(text)  # the callbacks log what rank 0 has done
        return text
    return (
        f"Rank {strategy.global_rank} saved its shards of {path} in "
        f"{sharded_files.incomplete_folder(path, save_id)}. The last rank that does so completes {path}; if one of "
        "them is dead, its shards are lost, and the newest complete checkpoint stays."
    )


def _place_of(trainer: Any, state: dict[str, Any]) -> str:
    """Return eight digits that are the same on all ranks that are at the same place of this fit."""
    place = state.get("loops", {}).get("drivetrain", {})
    at = (trainer.current_run.token, *(place.get(name) for name in ("current_epoch", "batches_done", "global_step")))
    return f"{zlib.crc32(repr(at).encode()):08x}"


def _is_sharded(strategy: Strategy) -> bool:
    """Return whether each rank can write its shards of the model and of the optimizers' states into local files."""
    if "drivetrain.strategies.fsdp" not in sys.modules:  # whoever has such a strategy has imported it
        return False
    from drivetrain.strategies.fsdp import FSDPStrategy

    state = ("lightning_module_state_dict", "optimizer_state", "open_gradients", "save_checkpoint")
    store = strategy.checkpoint_io
    if not isinstance(strategy, FSDPStrategy) or not isinstance(store, TorchCheckpointIO):
        return False
    return not any(defined_by_user(strategy, name) for name in state) and not overrides(
        store, "save_checkpoint", TorchCheckpointIO
    )


def _keep_earlier(store: CheckpointIO, path: str) -> None:
    """Copy a complete checkpoint that is to be replaced: the new one may lack the part of a rank that has died.

    The earlier copy is replaced by it. One that is itself incomplete is not kept.
    """
    from drivetrain.strategies import rank_files  # here, so that importing the Trainer stays quick
    from drivetrain.strategies.sharded_files import EARLIER

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
    """Return whether each rank has the whole model and the whole states of its optimizers.

    That is what a strategy says which leaves the verbs for them as they are; DDP's own leave them so too, but for
    optimizers that are spread over the ranks.
    """
    from drivetrain.strategies.ddp import DDPStrategy  # here, so that importing the Trainer stays quick

    state = ("lightning_module_state_dict", "optimizer_state", "open_gradients", "save_checkpoint")
    if all(any(overrides(strategy, name, base) for name in state) for base in (Strategy, DDPStrategy)):
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
