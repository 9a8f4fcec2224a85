"""How one model lives on its devices: one file per way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

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

__getattr__, __dir__ = lazy(__name__, _MODULES)
