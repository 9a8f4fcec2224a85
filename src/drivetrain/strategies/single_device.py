"""One model, one device, one process."""

from __future__ import annotations

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.precision.precision import Precision
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


@StrategyRegistry.register("single_device")
class SingleDeviceStrategy(Strategy):
    """The strategy for one device and one process.

    Args:
        device: the device of the model; ``None``: the accelerator's first device.
    """

    facts = Strategy.facts.but(local_passes="drivetrain.strategies.local_passes:LocalPasses")
    strategy_name = "single_device"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        if device is not None:
            self.own_parts.devices = (torch.device(device),)

    @property
    def root_device(self) -> torch.device:
        if devices := self.parallel_devices or self.own_parts.devices:
            return devices[0]
        if self.accelerator is None:  # neither a Trainer nor an Engine has set an accelerator
            return torch.get_default_device()
        return self.accelerator.get_parallel_devices([0])[0]
