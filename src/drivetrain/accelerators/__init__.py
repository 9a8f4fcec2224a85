"""Accelerators: one file per kind of hardware."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.accelerators.accelerator import Accelerator as Accelerator
    from drivetrain.accelerators.accelerator import AcceleratorRegistry as AcceleratorRegistry
    from drivetrain.accelerators.cpu import CPUAccelerator as CPUAccelerator
    from drivetrain.accelerators.cuda import CUDAAccelerator as CUDAAccelerator
    from drivetrain.accelerators.cuda import find_usable_cuda_devices as find_usable_cuda_devices
    from drivetrain.accelerators.mps import MPSAccelerator as MPSAccelerator
    from drivetrain.accelerators.torch_device import TorchDeviceAccelerator as TorchDeviceAccelerator
    from drivetrain.accelerators.xla import XLAAccelerator as XLAAccelerator
