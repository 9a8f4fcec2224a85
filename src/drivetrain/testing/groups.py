"""Check a user's process group, which communicates through another library than torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.group import Group


def check_group(group: Group) -> None:
    """Call every method of ``group``, and check the results. All ranks of the group must call this function at the same
    time.

    Raises:
        AssertionError: a result violates the contract. The message names the method.
    """
    ranks, rank = list(group.ranks), group.rank
    first, last = ranks[0], ranks[-1]
    tensor, row = torch.tensor([float(rank), 1.0]), torch.tensor([float(rank), -1.0])
    _expect("size", group.size, len(ranks))
    _expect("ranks[index]", ranks[group.index], rank)
    _expect("gather_objects(obj)", group.gather_objects({"rank": rank}), [{"rank": each} for each in ranks])
    _expect("all_gather(tensor)", group.all_gather(tensor).tolist(), [[float(each), 1.0] for each in ranks])
    _expect("all_gather(number)", group.all_gather(torch.tensor(rank)).tolist(), ranks)
    reductions = {"sum": sum(ranks), "mean": sum(ranks) / len(ranks), "min": min(ranks), "max": max(ranks)}
    for op, expected in reductions.items():
        _expect(f"all_reduce(tensor, {op!r})", group.all_reduce(tensor, op)[0].item(), float(expected))
    _expect("tensor after all_reduce", tensor.tolist(), [float(rank), 1.0])
    _expect("broadcast(obj)", group.broadcast(f"of {rank}"), f"of {first}")
    _expect(f"broadcast(obj, {last})", group.broadcast(f"of {rank}", last), f"of {last}")
    rows = group.gather_keyed(["a", "b"], row)
    _expect("gather_keyed(names, values)", rows.tolist(), [[float(each), -1.0] for each in ranks])
    sums, most = group.reduce_keyed(["a", "b"], row, row[:1])
    _expect("reduce_keyed(names, sums, most)", [*sums.tolist(), *most.tolist()], [sum(ranks), -len(ranks), max(ranks)])
    _expect("reduce_boolean_decision(decision)", group.reduce_boolean_decision(rank == first), len(ranks) == 1)
    _expect(
        "reduce_boolean_decision(decision, all=False)", group.reduce_boolean_decision(rank == first, all=False), True
    )
    group.barrier("check_group")
    if len(ranks) > 1:
        try:
            group.gather_keyed([f"of {rank}"], row[:1])
        except ConfigurationError:
            pass
        else:
            raise AssertionError("gather_keyed(names, values) raises no ConfigurationError where the names differ.")
    alone = group.new([rank])
    _expect("new([rank])", (alone.rank, list(alone.ranks), alone.index), (rank, [rank], 0))
    _expect("new([rank]).all_gather(tensor)", alone.all_gather(tensor).tolist(), [[float(rank), 1.0]])


def _expect(call: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{call} is {found}, and the contract of a group says {wanted}.")
