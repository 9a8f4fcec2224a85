"""Collects each rank's own state for the rank files beside a checkpoint, and reads the rank files.

With several processes, the checkpoint's main file contains the shared state and rank 0's own state. Each other rank has
a rank file for its own state. A rank's own state contains the random state ``rng``, the strategy's ``rank_state``, and
most of ``restart``. The entry ``restart`` has the gradients of an unfinished optimizer step, the running metrics, and
the states of the loaders and their workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import expect, restoring, shown_error
from drivetrain.base.seed import rng_state
from drivetrain.errors import CheckpointError
from drivetrain.loops.restart import capture
from drivetrain.module.loading import decode_parts
from drivetrain.strategies import rank_files
from drivetrain.trainer.other_ranks import read_by

if TYPE_CHECKING:
    from drivetrain.loops.run import Run
    from drivetrain.strategies.strategy import Strategy

with on_first_use:
    from drivetrain.trainer import stopping

State = dict[str, Any]
Trainer = Any  # an import would be circular

_OWN = ("rng", "restart", "rank_state")
_OF_THE_WINDOW = frozenset({"callbacks", "buffers", "precision", "rank_state"})
# The keys of the entry ``restart`` whose values are equal on every rank.
_SHARED = frozenset({"samples", "data_ranks", "divided_from", "exact", "settled", "cut_off", "ahead", "loaders"})


def of_ended_fit(run: Run | None, strategy: Strategy) -> list[State]:
    """Return every rank's own state after a fit. Every rank must call this function.

    Returns:
        One state for each rank. The list is empty if the fit has ended at the end of an epoch and
        ``strategy.rank_state`` is empty on all ranks. Any number of processes can then resume from the main file.
    """
    if run is None or run.progress.fn != "fit":
        return []
    own = strategy.rank_state(run.module)
    if not run.progress.epoch_cut and not any(strategy.world.gather_objects(bool(own))):
        return []
    state = dict(capture(run))
    part: State = {"loops": state.pop("progress"), "rng": state.pop("rng")}
    part["restart"] = {key: value for key, value in state.items() if key not in _OF_THE_WINDOW}
    if own:
        part["rank_state"] = own
    return strategy.world.gather_objects(part)


def own_part(state: Mapping[str, Any]) -> State:
    """Return this rank's own state: the entries of ``state`` whose values can differ between ranks."""
    part = {key: state[key] for key in _OWN if key in state}
    if "restart" in part:
        part["restart"] = {key: value for key, value in part["restart"].items() if key not in _SHARED}
    return part


def read(trainer: Trainer, checkpoint: Mapping[str, Any], path: str, weights_only: bool | None) -> list[State]:
    """Return one state for each rank that saved the checkpoint. States that this rank does not need are empty. Every
    rank must call this function.

    Some rank files are not needed to continue. If such a file is missing or damaged, its contents are replaced by rank
    0's state with this process's random state. If the number of ranks has changed, they are replaced by an empty state.

    Args:
        trainer: the Trainer of the run that resumes.
        checkpoint: the contents of the main file.
        path: the path of the main file.
        weights_only: the argument of ``Trainer.fit``.

    Raises:
        CheckpointError: a rank's file is missing or damaged, and the run needs this file. Every rank raises this error.
    """
    strategy, listed = trainer.strategy, checkpoint["rank_files"]
    parts: list[State] = [{} for _ in range(rank_files.saved_by(listed))]
    as_many, failure = len(parts) == strategy.world_size, None
    main = {key: checkpoint[key] for key in _OWN if key in checkpoint}
    needed = as_many or is_inside(checkpoint)
    for rank in read_by(checkpoint, strategy.global_rank, strategy.world_size) if needed else ():
        if rank == 0:
            parts[0] = main
            continue
        try:
            with restoring(f"the file of rank {rank}"):
                part = rank_files.read(strategy, listed, rank, path, weights_only)
                parts[rank] = _joined(main, decode_parts(part))
        except Exception as error:
            parts[rank], failure = _replaced(main) if as_many else {}, shown_error(error)
    failures = [text for text in strategy.world.gather_objects(failure) if text]
    if failures and (is_inside(checkpoint) if as_many else "window" in checkpoint.get("restart", {})):
        raise CheckpointError(
            f"The checkpoint was saved inside an epoch, and one of the files that its processes wrote beside it cannot "
            f"be used: {failures[0]}. Put that file back beside the checkpoint, or resume from "
            f"{stopping.end_of_epoch(trainer, path, checkpoint['state_dict'])}. The weights alone can be loaded "
            "without it."
        )
    if failures and as_many:
        rank_zero_warn(
            f"{path}: {failures[0]}. The checkpoint was saved at the end of an epoch, so training continues, but "
            "without the random state of that process: its random numbers differ from those of the interrupted run. "
            "Put the file back beside the checkpoint to resume exactly."
        )
    elif failures:
        rank_zero_warn(
            f"{path}: {failures[0]}. Training continues without what that process had logged in this epoch: the means, "
            "sums and metrics of the epoch, and what callbacks monitor of them, lack its samples. Its random state is "
            "lost too. Put the file back beside the checkpoint to keep them."
        )
    return parts


def _joined(main: State, part: Mapping[str, Any]) -> State:
    joined = {key: part[key] for key in _OWN if key in part}
    if "restart" in joined:
        shared = {key: value for key, value in main.get("restart", {}).items() if key in _SHARED}
        joined["restart"] = {**shared, **expect(joined["restart"], Mapping, "['restart']")}
    return joined


def _replaced(main: State) -> State:
    """Return a replacement for the contents of a lost rank file. The checkpoint must be from the end of an epoch."""
    restart = {key: value for key, value in main.get("restart", {}).items() if key != "val_loaders"}
    if _has_loader_state(restart.get("data")):
        restart["data"] = None  # rank 0's position is not that of the lost rank's loader
    return {"rng": rng_state(), "restart": restart}


def _has_loader_state(position: Any) -> bool:
    if not isinstance(position, Mapping):
        return False
    return "loader" in position or any(map(_has_loader_state, position.get("parts", ())))


def is_inside(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was saved inside an epoch, or between two batches of one optimizer step."""
    saved = checkpoint.get("loops", {}).get("drivetrain") or {}
    in_epoch = bool(saved.get("batches_done")) and not saved.get("epoch_ending")
    return in_epoch or "window" in checkpoint.get("restart", {})
