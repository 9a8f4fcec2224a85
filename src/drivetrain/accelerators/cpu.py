"""The accelerator for the host's processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.packages import psutil
from drivetrain.errors import ConfigurationError, WrongTypeError


class CPUAccelerator(Accelerator):
    """The host's processors.

    ``devices`` is the number of processes, not of cores: in one process, torch uses all cores.
    """

    _names = ("cpu",)
    auto_priority = 0

    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigurationError(
                f"CPUAccelerator got the device {device}. Pass a device of type cpu, or use its own accelerator."
            )

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of processes for ``devices``. ``devices`` must be a positive int, or a text with its
        digits.
        """
        count = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            numbers = count.split(",") if isinstance(count, str) else count
            # for a list of numbers, the error message proposes one process per number
            meant = len(numbers) if isinstance(numbers, (list, tuple)) else 1
            raise WrongTypeError(
                f"On the CPU, devices is a number of processes of at least 1, not {devices!r}. Write devices={meant}."
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        count = len(devices) if isinstance(devices, (list, tuple)) else devices
        return [torch.device("cpu")] * count

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the percentages of processor time, memory and swap in use on this host."""
        return {
            "cpu_percent": psutil.cpu_percent(),
            "cpu_vm_percent": psutil.virtual_memory().percent,
            "cpu_swap_percent": psutil.swap_memory().percent,
        }

    def total_memory(self, device: torch.device) -> int | None:
        """Return the host's memory."""
        return int(psutil.virtual_memory().total)
