"""What a device is: one file per kind of hardware."""

from drivetrain.accelerators.accelerator import Accelerator, AcceleratorRegistry
from drivetrain.accelerators.cpu import CPUAccelerator
from drivetrain.accelerators.cuda import CUDAAccelerator, find_usable_cuda_devices
from drivetrain.accelerators.mps import MPSAccelerator
from drivetrain.accelerators.torch_device import TorchDeviceAccelerator
from drivetrain.accelerators.xla import XLAAccelerator

__all__ = [
    "Accelerator", "AcceleratorRegistry", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator",
    "TorchDeviceAccelerator", "XLAAccelerator", "find_usable_cuda_devices",
]  # fmt: skip
