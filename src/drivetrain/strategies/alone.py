"""Save when a fit ends with an exception. Each rank saves without communication, because another rank may be dead."""

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
"""The methods that return or save states. If no rank has the complete state, the strategy overrides at least one of
them.
"""


@contextmanager
def alone(strategy: Strategy, what: Alone) -> Iterator[Alone]:
    """Context in which the strategy's groups contain only this rank, so that collectives of these groups wait for no
    other rank. Yields ``what``: "whole" if this rank can save the complete state, "shards" if it can save its shards,
    "" if it can save no state.
    """
    hurry()  # a background save then waits only briefly for other ranks
    with temporarily(vars(strategy), _groups=(LoneGroup(strategy.global_rank),) * 3):
        yield what


def whole_here(strategy: Strategy, base: type = Familiar) -> Alone:
    """Return "whole" if each rank has the complete model and optimizer states, else "".

    The result is "" in three cases: the strategy overrides a method of ``base`` in :data:`STATE_VERBS`, an optimizer's
    state is spread over the ranks, or ranks have different parts of the model.
    """
    if any(overrides(strategy, name, base) for name in STATE_VERBS):
        return ""
    spread = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return "" if spread or strategy.data.size != strategy.world_size else "whole"
