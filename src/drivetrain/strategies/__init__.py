"""How one model lives on its devices: one file per way."""

from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.single_device import SingleDeviceStrategy
from drivetrain.strategies.strategy import Strategy, StrategyRegistry

__all__ = ["DDPStrategy", "ParallelStrategy", "SingleDeviceStrategy", "Strategy", "StrategyRegistry"]
