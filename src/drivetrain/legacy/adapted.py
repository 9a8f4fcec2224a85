"""Today's strategies whose methods call an object of an earlier generation."""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain.base.registry import Entry
from drivetrain.strategies.facts import Earlier
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


class Adapted:
    """Base of the mixins that come before a strategy class; :attr:`usual` has that class's own methods.

    Attributes:
        source: the object of the earlier generation that the strategy's methods call.
    """

    source: Any
    earlier: ClassVar[Earlier]  # what the mixin calls beyond today's steps
    splits_batches: bool  # whether the strategy itself calls the ends of steps

    # of the strategy class that follows in the order of bases
    lightning_module: Any
    model: Any
    driver: Any
    facts: Any
    global_rank: int
    world_size: int
    precision_plugin: Any
    bind: Any
    manual_backward_context: Any
    _module_step: Any

    @property
    def usual(self) -> Any:
        """The methods and properties of today's strategy, without the mixins."""
        return super()

    def __reduce__(self) -> Any:
        mixin, strategy = type(self).__bases__
        return _bare, (mixin, strategy), self.__getstate__()  # type: ignore[attr-defined]


def adapted(mixin: type[Adapted], entry: Entry[Strategy] | str, source: Any, **arguments: Any) -> Any:
    """Return a strategy whose methods are those of ``mixin`` before those of a class of today.

    Args:
        mixin: its methods call ``source``, and ``self.usual`` for what the strategy itself does.
        entry: a registered strategy, or its name.
        source: the object of the earlier generation.
        arguments: of the strategy's constructor.
    """
    found = StrategyRegistry.entry(entry) if isinstance(entry, str) else entry
    strategy = adapted_class(mixin, found.cls)(**{**found.init_params, **arguments})
    strategy.source = source
    return strategy


_CLASSES: dict[tuple[type, type], Any] = {}


def adapted_class(mixin: type[Adapted], strategy: type[Strategy]) -> Any:
    """Return the class that has the methods of ``mixin`` before those of ``strategy``."""
    if (mixin, strategy) not in _CLASSES:
        name = f"{mixin.__name__}{strategy.__name__}"
        own = {"facts": strategy.facts.but(earlier=mixin.earlier), "splits_batches": strategy.facts.earlier.step_ends}
        _CLASSES[mixin, strategy] = type(name, (mixin, strategy), {"__module__": mixin.__module__, **own})
    return _CLASSES[mixin, strategy]


def _bare(mixin: type[Adapted], strategy: type[Strategy]) -> Any:
    """Return an empty object of the adapted class, whose state pickle then sets."""
    cls = adapted_class(mixin, strategy)
    return cls.__new__(cls)
