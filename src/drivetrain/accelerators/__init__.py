"""Accelerators: one file per kind of hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.accelerators.accelerator import Accelerator as Accelerator
    from drivetrain.accelerators.accelerator import AcceleratorRegistry as AcceleratorRegistry
    from drivetrain.accelerators.cpu import CPUAccelerator as CPUAccelerator
    from drivetrain.accelerators.cuda import CUDAAccelerator as CUDAAccelerator
    from drivetrain.accelerators.cuda import find_usable_cuda_devices as find_usable_cuda_devices
    from drivetrain.accelerators.mps import MPSAccelerator as MPSAccelerator
    from drivetrain.accelerators.torch_device import TorchDeviceAccelerator as TorchDeviceAccelerator
    from drivetrain.accelerators.xla import XLAAccelerator as XLAAccelerator
_MODULES = {
    "Accelerator": "accelerator",
    "AcceleratorRegistry": "accelerator",
    "CPUAccelerator": "cpu",
    "CUDAAccelerator": "cuda",
    "MPSAccelerator": "mps",
    "TorchDeviceAccelerator": "torch_device",
    "XLAAccelerator": "xla",
    "find_usable_cuda_devices": "cuda",
}
__all__ = list(_MODULES)

lazy(__name__, _MODULES)
