"""The optimizer of the user beside the one that DeepSpeed's engine steps: the same kind, with other tensors.

ZeRO puts its own flat tensors into the parameter groups of the optimizer that it gets. Checkpoints, schedulers and
callbacks look at the user's, whose groups stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


def trained_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that DeepSpeed's engine knows: those with a parameter that is trained."""
    return [group for group in optimizer.param_groups if any(each.requires_grad for each in group["params"])]


def pass_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for theirs, mine in zip(source, target, strict=True):
        for name, value in theirs.items():
            if name != "params":
                mine[name] = value


def stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind for the engine, which puts its own flat tensors into the parameter groups."""
    groups = [
        {**group, "params": [each for each in group["params"] if each.requires_grad]}
        for group in trained_groups(optimizer)
    ]
    return like(optimizer, groups)


def like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})  # a scheduler's
    made.param_groups, made.state = groups, type(optimizer.state)(optimizer.state.default_factory)
    return made
