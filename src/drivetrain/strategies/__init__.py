"""How one model lives on its devices: one file per way."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.strategies.ddp import DDPStrategy as DDPStrategy
    from drivetrain.strategies.parallel import ParallelStrategy as ParallelStrategy
    from drivetrain.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
    from drivetrain.strategies.strategy import Strategy as Strategy
    from drivetrain.strategies.strategy import StrategyRegistry as StrategyRegistry
_MODULES = {
    "DDPStrategy": "ddp",
    "ParallelStrategy": "parallel",
    "SingleDeviceStrategy": "single_device",
    "Strategy": "strategy",
    "StrategyRegistry": "strategy",
}
__all__ = [
    "DDPStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyRegistry",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    from drivetrain.errors import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
