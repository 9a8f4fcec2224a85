"""Combinations that ``Trainer(split_on_oom=True)`` does not support, refused before anything is built."""

from __future__ import annotations

from typing import Any

from drivetrain.base.introspect import defined_by_user, takes_iterator
from drivetrain.errors import ConfigurationError
from drivetrain.settings import Settings
from drivetrain.strategies.strategy import Strategy

_VERBS = (
    "training_step", "pre_backward", "backward", "post_backward", "optimizer_step", "zero_grad", "bind_step",
    "block_backward_sync",
)  # fmt: skip


def check_split(module: Any, settings: Settings, strategy: Strategy) -> None:
    """Check that batches of ``module`` can be split.

    Raises:
        ConfigurationError: they cannot; the message gives the reason, and what to leave out.
    """
    why = _why_not(module, settings, strategy)
    if why:
        raise ConfigurationError(f"Trainer(split_on_oom=True) {why} Leave split_on_oom out.")


def _why_not(module: Any, settings: Settings, strategy: Strategy) -> str:
    name, kind = type(module).__name__, type(strategy).__name__
    refused = strategy.facts.refuses.get("split_on_oom")
    own = [verb for verb in _VERBS if defined_by_user(strategy, verb)]
    reasons = (
        (
            not module.automatic_optimization,
            f"runs batches again, and {name} optimizes manually: its training_step would step twice.",
        ),
        (defined_by_user(module, "optimizer_step"), f"steps the optimizer itself, and {name} has an optimizer_step."),
        (takes_iterator(module.training_step), f"splits batches, and {name}.training_step fetches them itself."),
        (not strategy.facts.local_passes, f"does not work with {kind}. It works with one device, DDP and FSDP."),
        (bool(own), f"replaces the step of the strategy, and {kind} has a {own[0] if own else ''} of its own."),
        (
            settings.sync_batchnorm or strategy.layer_sync is not None,
            "lets ranks run batches again by themselves, and batch norm over all processes would wait for the others.",
        ),
        (refused is not None, str(refused)),
    )
    return next((text for holds, text in reasons if holds), "")
