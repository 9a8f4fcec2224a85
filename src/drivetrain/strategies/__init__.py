"""How one model lives on its devices: one file per way."""

from drivetrain.strategies.single_device import SingleDeviceStrategy
from drivetrain.strategies.strategy import Strategy, StrategyRegistry

__all__ = ["SingleDeviceStrategy", "Strategy", "StrategyRegistry"]
