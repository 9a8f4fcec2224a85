"""Creates strategies of drivetrain whose methods call an accelerator of an earlier Lightning generation."""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain.base.registry import Entry
from drivetrain.strategies.facts import Earlier, Shared
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


class Adapted(Shared):
    """Base class of mixins that override a strategy's methods. A mixin finds the overridden methods in :attr:`usual`.

    Attributes:
        source: the earlier generation's accelerator, which the strategy's methods call.
    """

    source: Any
    earlier: ClassVar[Earlier]  # hooks and arguments of the earlier generation that the mixin supports
    splits_batches: bool  # whether the strategy class calls hooks such as training_step_end

    # The strategy class, which is the second base class, defines these members.
    world_size: int
    bind: Any
    manual_backward_context: Any
    _module_step: Any

    @property
    def usual(self) -> Any:
        """The methods and properties of the strategy class, without the mixin's overrides."""
        return super()

    def __reduce__(self) -> Any:
        mixin, strategy = type(self).__bases__
        return _bare, (mixin, strategy), self.__getstate__()  # type: ignore[attr-defined]


def adapted(mixin: type[Adapted], entry: Entry[Strategy] | str, source: Any, **arguments: Any) -> Any:
    """Create one of drivetrain's strategies; methods of ``mixin`` override the strategy's methods.

    Args:
        mixin: a class whose methods call ``source``.
        entry: a registered strategy, or its name.
        source: the accelerator of the earlier generation.
        arguments: arguments of the strategy's constructor.
    """
    found = StrategyRegistry.entry(entry) if isinstance(entry, str) else entry
    strategy = adapted_class(mixin, found.cls)(**{**found.init_params, **arguments})
    strategy.source = source
    return strategy


_CLASSES: dict[tuple[type, type], Any] = {}


def adapted_class(mixin: type[Adapted], strategy: type[Strategy]) -> Any:
    """Return a subclass of ``mixin`` and ``strategy``; methods of ``mixin`` override the methods of ``strategy``."""
    if (mixin, strategy) not in _CLASSES:
        name = f"{mixin.__name__}{strategy.__name__}"
        own = {"facts": strategy.facts.but(earlier=mixin.earlier), "splits_batches": strategy.facts.earlier.step_ends}
        _CLASSES[mixin, strategy] = type(name, (mixin, strategy), {"__module__": mixin.__module__, **own})
    return _CLASSES[mixin, strategy]


def _bare(mixin: type[Adapted], strategy: type[Strategy]) -> Any:
    """Return an object without state; pickle then sets the object's state."""
    cls = adapted_class(mixin, strategy)
    return cls.__new__(cls)
