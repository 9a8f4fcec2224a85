"""Save without communication when a fit ends with an exception, because another rank may be dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from drivetrain.base.introspect import overrides, temporarily
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.group import LoneGroup
from drivetrain.strategies.waiting import hurry

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

Alone = Literal["whole", "shards", ""]

STATE_VERBS = (
    "lightning_module_state_dict", "module_state", "optimizer_state", "open_gradients", "save_checkpoint",
)  # fmt: skip
"""The methods that a strategy overrides if no rank has the complete state of the model."""


@contextmanager
def alone(strategy: Strategy, what: Alone) -> Iterator[Alone]:
    """Context in which this rank does not communicate; yields ``what``, the kind of state that this rank can save
    alone.
    """
    hurry()  # lets background saves soon give up waiting for other ranks
    with temporarily(vars(strategy), _groups=(LoneGroup(strategy.global_rank),) * 3):
        yield what


def whole_here(strategy: Strategy, base: type = Familiar) -> Alone:
    """Return "whole" if each rank has the complete model and optimizer states, else "".

    "whole" requires that the strategy overrides no state method of ``base``, and that no optimizer's state is spread
    over the ranks.
    """
    if any(overrides(strategy, name, base) for name in STATE_VERBS):
        return ""
    spread = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return "" if spread or strategy.data.size != strategy.world_size else "whole"
