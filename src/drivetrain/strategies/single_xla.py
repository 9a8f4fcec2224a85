"""One model, one XLA device, one process."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.precision.precision import Precision
from drivetrain.strategies._xla import XLAExecution, checked, device_meant
from drivetrain.strategies.single_device import SingleDeviceStrategy
from drivetrain.strategies.strategy import StrategyRegistry


@StrategyRegistry.register("single_xla")
class SingleDeviceXLAStrategy(XLAExecution, SingleDeviceStrategy):
    """The strategy for one XLA device, such as one core of a TPU, through torch_xla.

    Args:
        device: the device of the model, a number or a device; ``None``: the first device.
        accelerator, precision_plugin: as for every strategy.
        checkpoint_io: the checkpoint store; ``None``: an ``XLACheckpointIO``.
        debug: let torch_xla report the reasons for compilations and the places where values are read
            (``PT_XLA_DEBUG``).
        unknown: any other argument raises an error.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        TypeError: ``checkpoint_io`` or ``precision_plugin`` has a wrong type.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        **unknown: Any,
    ) -> None:
        checkpoint_io = checked(type(self), unknown, checkpoint_io, precision_plugin)
        super().__init__(None if device is None else device_meant(device), accelerator, checkpoint_io, precision_plugin)
        self.debug = debug
