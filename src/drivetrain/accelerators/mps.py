"""The accelerator for Apple's GPUs."""

from __future__ import annotations

import torch

from drivetrain.accelerators.torch_device import TorchDeviceAccelerator
from drivetrain.base.packages import psutil


class MPSAccelerator(TorchDeviceAccelerator):
    """Apple's GPUs. A machine has one such device.

    The device has no float64, and a job that uses the device has only one process.
    """

    _names = ("mps",)
    type = "mps"
    auto_priority = 300
    supports_float64 = False
    supports_streams = False
    supports_non_blocking = False  # copies give wrong values: https://github.com/pytorch/pytorch/issues/189690
    supports_several_devices = False

    @classmethod
    def auto_device_count(cls) -> int:
        return 1  # the caller converts values such as devices=-1 to this count

    @classmethod
    def is_available(cls) -> bool:
        return torch.backends.mps.is_available()

    @classmethod
    def why_unavailable(cls) -> str:
        if not torch.backends.mps.is_built():
            return "this build of torch has no MPS"
        return "it needs macOS 14 and Apple silicon"

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the percentages of processor time, memory and swap in use on the host, and the number of bytes of the
        GPU's tensors. The GPU shares the host's memory.
        """
        return {
            "M1_cpu_percent": psutil.cpu_percent(),
            "M1_vm_percent": psutil.virtual_memory().percent,
            "M1_swap_percent": psutil.swap_memory().percent,
            "allocated_bytes": float(torch.mps.current_allocated_memory()),
            "driver_allocated_bytes": float(torch.mps.driver_allocated_memory()),
        }

    def memory_allocated(self, device: torch.device) -> int | None:
        return torch.mps.current_allocated_memory()

    def max_memory_allocated(self, device: torch.device) -> int | None:
        return None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Do nothing: MPS has no peak to reset."""

    def total_memory(self, device: torch.device) -> int | None:
        return torch.mps.recommended_max_memory()
