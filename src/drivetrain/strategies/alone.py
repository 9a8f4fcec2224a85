"""What a rank can save by itself, when a fit ends by an exception and another rank may be dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from drivetrain.base.introspect import overrides
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.group import LoneGroup
from drivetrain.strategies.state import State
from drivetrain.strategies.step import Step

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

Alone = Literal["whole", "shards", ""]

STATE_VERBS = (
    "lightning_module_state_dict", "module_state", "optimizer_state", "open_gradients", "save_checkpoint",
)  # fmt: skip
"""What a strategy overrides whose ranks need each other for the state of the model."""


@contextmanager
def alone(strategy: Strategy, what: Alone) -> Iterator[Alone]:
    """Context in which this rank exchanges nothing with the others; it yields ``what`` can be saved so."""
    groups, lone = strategy._groups, LoneGroup(strategy.global_rank)
    strategy._groups = lone, lone, lone
    try:
        yield what
    finally:
        strategy._groups = groups


def whole_here(strategy: Strategy, *bases: type) -> Alone:
    """Return "whole" if each rank has the whole model and the whole states of its optimizers, else "".

    That is so where the verbs of state are those of ``bases``, without any those of the contract, and no optimizer is
    spread over the ranks.
    """
    known = [(base, name) for base in bases or (State, Step, Familiar) for name in STATE_VERBS if hasattr(base, name)]
    if any(overrides(strategy, name, base) for base, name in known):
        return ""
    spread = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return "" if spread or strategy.data.size != strategy.world_size else "whole"
