"""The user's optimizer, and an optimizer of the same class that DeepSpeed's engine steps on its own tensors.

ZeRO replaces the tensors in the parameter groups of its optimizer with flat tensors of its own. Checkpoints, schedulers
and callbacks use the user's optimizer, whose groups are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import LBFGS, Optimizer

from drivetrain.errors import ConfigurationError


def check(optimizers: Sequence[Optimizer], has_scheduler: bool, config: Mapping[str, Any]) -> None:
    """Check that DeepSpeed's engine supports what ``configure_optimizers`` returned.

    Args:
        optimizers: the optimizers that it returned.
        has_scheduler: whether it also returned a scheduler.
        config: the configuration of the engine.

    Raises:
        ConfigurationError: the engine does not support them, or its configuration names another optimizer.
    """
    named = "optimizer" in config
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed's engine steps one. "
            "Put all parameters into one optimizer, with a parameter group for each kind."
        )
    if named == bool(optimizers):
        both = "and DeepSpeed's configuration names one too" if named else "and DeepSpeed cannot train without one"
        count = "one optimizer" if optimizers else "no optimizer"
        raise ConfigurationError(f"configure_optimizers returned {count}, {both}. Give one in one of the two places.")
    if has_scheduler and "scheduler" in config:
        raise ConfigurationError(
            "configure_optimizers returned a scheduler, and DeepSpeed's configuration names one too. Give one of them."
        )
    if any(isinstance(each, LBFGS) for each in optimizers):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times per step, and DeepSpeed's engine steps once after a "
            'backward pass. Use another optimizer, or strategy="ddp".'
        )


def trained_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that DeepSpeed's engine has: those with at least one trained parameter."""
    return [group for group in optimizer.param_groups if any(each.requires_grad for each in group["params"])]


def pass_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for theirs, mine in zip(source, target, strict=True):
        mine.update({name: value for name, value in theirs.items() if name != "params"})


def pass_options_to(engine: Any, optimizer: Optimizer) -> None:
    """Copy the current options of the user's optimizer to the engine's optimizer."""
    pass_options(trained_groups(optimizer), engine.basic_optimizer.param_groups)


def take_options_of(engine: Any, optimizer: Optimizer) -> None:
    """Copy the current options of the engine's optimizer to the user's optimizer."""
    pass_options(engine.basic_optimizer.param_groups, trained_groups(optimizer))


def stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class for the engine, which replaces the tensors in its parameter groups."""
    groups = [
        {**group, "params": [each for each in group["params"] if each.requires_grad]}
        for group in trained_groups(optimizer)
    ]
    return like(optimizer, groups)


def like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    # a scheduler has wrapped step
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.param_groups, made.state = groups, type(optimizer.state)(optimizer.state.default_factory)
    return made
