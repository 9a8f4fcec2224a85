"""What a device is: one file per kind of hardware."""

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.accelerators.cpu import CPUAccelerator
from drivetrain.accelerators.torch_device import TorchDeviceAccelerator

__all__ = ["Accelerator", "CPUAccelerator", "TorchDeviceAccelerator"]
