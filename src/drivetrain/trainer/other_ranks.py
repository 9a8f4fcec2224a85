"""Resumes from a checkpoint that a different number of ranks has saved: gives each rank a part of the saved state.

Suppose that N ranks have saved the checkpoint, and that M ranks resume. Rank r then restores the running means and
metric objects of the saved ranks r, r + M, and so on. If there is no saved rank r, rank r begins with empty ones. If
the checkpoint was saved between two batches of one optimizer step, every rank gets the mean of the N ranks' gradients.
The mean over the M ranks is then the mean over the N ranks. The position in the data counts the finished samples of all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import expect, of_length, restoring
from drivetrain.data.stateful import samples_of_all_ranks
from drivetrain.errors import CheckpointError, number_of
from drivetrain.loops.metrics import merged_states, metrics_in
from drivetrain.loops.restart import counted
from drivetrain.loops.restart_checks import check_restart
from drivetrain.strategies import rank_files

with on_first_use:
    from drivetrain.trainer import stopping

State = dict[str, Any]
_OF_WINDOW = ("window", "gradients", "shards")


def saved_by(checkpoint: Mapping[str, Any]) -> int:
    """Return the number of ranks that saved ``checkpoint``."""
    return len(checkpoint["ranks"]) if "ranks" in checkpoint else rank_files.saved_by(checkpoint.get("rank_files", ()))


def read_by(checkpoint: Mapping[str, Any], rank: int, ranks: int) -> Iterable[int]:
    """Return the saved ranks whose states rank ``rank`` of ``ranks`` reads. If the number of ranks has changed and the
    checkpoint contains an unfinished optimizer step, each rank reads all states.
    """
    count = saved_by(checkpoint)
    if count == ranks:
        return [rank]
    return range(count) if "window" in checkpoint.get("restart", {}) else range(rank, count, ranks)


def why_as_many(checkpoint: Mapping[str, Any], now: int) -> str:
    """Return why ``now`` ranks cannot resume inside an epoch if another number of ranks has saved ``checkpoint``; "" if
    they can resume.
    """
    restart = _common(checkpoint)
    data, ranks = restart.get("data"), saved_by(checkpoint)
    if not isinstance(data, Mapping) or "given" not in data:
        return "its position in the data counts no samples"
    if samples_of_all_ranks(data) is not None:
        return ""
    if restart.get("samples") is None:
        own = "its loader has stored its own position on each of them"
        return own if "loader" in data else "its position in the data counts no samples"
    if ranks > 1 and restart.get("data_ranks") != ranks:
        return "they did not share out the samples of one loader among all of them"
    # With one process, torchdata's loader with workers draws one random number more than with several processes.
    if ranks == 1 < now and data.get("num_workers"):
        return "the order of its loader with workers is that of one process"
    return ""


def _common(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    first = checkpoint["ranks"][0] if checkpoint.get("ranks") else {}
    return expect({**expect(first, Mapping), **checkpoint}.get("restart", {}), Mapping, "['restart']")


def of_this_rank(trainer: Any, checkpoint: Mapping[str, Any], inside: bool) -> Mapping[str, Any]:
    """Return the state from which this rank resumes: random state, position in the data, gradients.

    Args:
        trainer: the Trainer, with the module set up.
        checkpoint: the checkpoint. The entry ``ranks`` contains the state of each rank in :func:`read_by`.
        inside: whether the checkpoint was saved inside an epoch.

    Raises:
        CheckpointError: a rank's state is damaged. Also raised if the number of ranks has changed, and the checkpoint's
            position does not allow a change.
    """
    ranks = checkpoint.get("ranks", [checkpoint])
    if len(ranks) == trainer.world_size:
        with restoring(f"rank {trainer.global_rank}"):
            own: Mapping[str, Any] = expect(ranks[trainer.global_rank], {"rng?": (Mapping, None), "restart?": Mapping})
        return own
    if inside and (why := why_as_many(checkpoint, trainer.world_size) or _not_one_order(trainer)):
        raise CheckpointError(
            f"The checkpoint was saved in the middle of an epoch by {len(ranks)} processes, and there are "
            f"{trainer.world_size}: {why}. Resume with as many, or from "
            f"{stopping.end_of_epoch(trainer, trainer.ckpt_path, checkpoint['state_dict'])}. [DT1040]"
        )
    if any("rank_state" in each for each in (checkpoint, *ranks)):
        rank_zero_warn(rank_files.of_other_ranks(trainer.strategy, len(ranks)))
    with restoring("the parts of other ranks"):
        return _of_rank(checkpoint, trainer.lightning_module, trainer.global_rank, trainer.world_size, inside)


def _not_one_order(trainer: Any) -> str:
    parts, ranks = trainer.strategy.data.size, trainer.world_size
    return "" if parts == ranks else f"now {ranks} processes train on {parts} parts of the data"


def _of_rank(checkpoint: Mapping[str, Any], module: nn.Module, rank: int, ranks: int, inside: bool) -> State:
    """Return the state from which rank ``rank`` of ``ranks`` resumes: a random state, and the entry ``restart``."""
    common, count = _common(checkpoint), saved_by(checkpoint)
    parts = [expect(each, Mapping) for each in checkpoint.get("ranks", [checkpoint])]
    kept = ("loaders", "callback_metrics", "agreed_steps")  # these entries are equal on all ranks
    restart: State = {key: common[key] for key in kept if key in common}
    found = [part.get("restart", {}) for part in parts[rank::ranks] if part]
    for each in found:
        check_restart({key: value for key, value in each.items() if key not in _OF_WINDOW}, module)
    if inside:
        restart = {key: value for key, value in common.items() if key not in _OF_WINDOW}
        own_data = found[0].get("data") if found else None
        restart["data"] = _position(common["data"], own_data)
        restart["logged"] = [state for each in found for state in each.get("logged", [])] or [
            # With sync_dist, all ranks must reduce the same names, so the value of "fresh" is kept.
            {
                **state,
                "total": None,
                "weight": 0,
                "pending": None,
                "last": None,
                "last_weight": 0,
                "fresh": state["fresh"] and state["options"]["sync_dist"],
            }
            for state in common.get("logged", [])
        ]
        restart["metrics"], lost = _metrics([each.get("metrics", {}) for each in found], common["metrics"], module)
        _tell(common, count, ranks, lost)
    elif "sample_in_epoch" in ((common.get("data") or {}).get("loader") or ()):
        # A loader's state with this entry also has the number of the next epoch. litData's states have no such entry,
        # and its loader cannot load a state from the end of an epoch.
        restart["data"] = _position(common["data"], None)
    if "window" in common:
        windows = [part["restart"] for part in parts if "window" in part.get("restart", {})]
        restart |= _window(windows, count, module, ranks)
    restart |= {"saved_by": count, "data_ranks": ranks}
    rng = parts[rank].get("rng") if rank < count and parts[rank] else checkpoint.get("rng", parts[0].get("rng"))
    return {"rng": rng, "restart": restart}


def _position(data: Mapping[str, Any], own: Any) -> State:
    """Return a rank's position in the data. It is rank 0's position, with the rank's own entry "rng"."""
    position = {key: value for key, value in data.items() if not key.startswith("workers")}
    if "loader" in position and samples_of_all_ranks(position) is None:
        position["loader"] = None  # only rank 0's loader can load this state
    if isinstance(own, Mapping) and "rng" in own:
        position["rng"] = own["rng"]
    return position


def _metrics(found: Sequence[Any], first: Mapping[str, Any], module: nn.Module) -> tuple[State, list[str]]:
    """Return the merged states of the metric objects, and the names of states that cannot be merged. For a state that
    cannot be merged, the result contains the first rank's state in ``found``.
    """
    there, states, lost = metrics_in(module), dict[str, Any](), list[str]()
    for place in first.keys() & there.keys():
        states[place], kept = merged_states(there[place], [each[place] for each in found if place in each])
        lost += [f"{place}.{name}" for name in kept]
    return states, lost


def _tell(common: Mapping[str, Any], count: int, ranks: int, lost: Sequence[str]) -> None:
    notes = []
    if "loader" in common["data"] and samples_of_all_ranks(common["data"]) is None:
        notes.append("the loader's batches up to there are fetched again and left out")
    if common["data"].get("workers"):
        notes.append("the random states of the loader's workers are lost")
    if lost:
        notes.append(f"of {', '.join(lost)}, which are not summed over ranks, only some ranks' are kept")
    if ranks > count:
        notes.append("ranks that are new begin with the random state of rank 0")
    note = f" ({'; '.join(notes)})" if notes else ""
    rank_zero_info(
        f"The checkpoint was saved inside an epoch by {number_of(count, 'process')}, after {counted(common)}. "
        f"Now there {'are' if ranks > 1 else 'is'} {ranks}{note}."
    )


def _window(parts: Sequence[Mapping[str, Any]], count: int, module: nn.Module, ranks: int) -> State:
    """Return the state of an unfinished optimizer step, equal for all resuming ranks: counters and complete gradients.

    If losses have weights, the gradients are those of the weighted mean loss over the finished batches of all ranks.
    The sum of the weights is divided equally among the new ranks.

    Args:
        parts: the entry ``restart`` of each saved rank with gradients.
        count: the number of ranks that saved the checkpoint.
        module: the module.
        ranks: the number of ranks that resume.
    """
    window_of_first = parts[0]["window"]
    window = {**window_of_first, "exchanged": False}
    # True: the saved gradients are already means over all ranks, or shards of these means
    exchanged = window_of_first.get("exchanged", False)
    shares = [1 / count] * len(parts)
    if window["reference"] is not None:
        held = len(parts) if exchanged else 1
        total = sum(float(each["window"]["total"]) for each in parts) / held
        shares = [float(each["window"]["reference"]) / held / (total or 1) for each in parts]
        window["reference"] = window["total"] = total / ranks
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for part, share in zip(parts, shares, strict=True):
        for name, gradient in part["gradients"].items():
            if name not in sums:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                sums[name], dtypes[name] = torch.zeros(shapes[name], dtype=wide), gradient.dtype
            if not exchanged or name not in part.get("shards", ()):
                sums[name] += gradient.to(sums[name]) * share
                continue
            if not gradient.numel():  # an empty shard has no offset
                continue
            [at] = of_length(1, part["shards"].get(name), f"['shards'][{name!r}]")
            region = tuple(slice(start, start + size) for start, size in zip(at, gradient.shape, strict=True))
            # only one rank has this shard, so it is added with the share of all ranks
            sums[name][region] += gradient.to(sums[name]) * (share * count)
    return {"window": window, "gradients": {name: each.to(dtypes[name]) for name, each in sums.items()}}
