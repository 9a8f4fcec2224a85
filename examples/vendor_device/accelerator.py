"""What drivetrain needs to know about the device: ``Trainer(accelerator="lab")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.accelerators import Accelerator
from vendor_device import lab


class LabAccelerator(Accelerator):
    """lab's devices. The first five methods are required; what else drivetrain may ask is answered by defaults."""

    supports_pinned_memory = True
    supports_streams = True  # claims are tested by drivetrain's conformance suite

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices  # a number, a list or a text such as "0,1" arrives below as indices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("lab", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return lab.device_count()

    @staticmethod
    def is_available() -> bool:
        return lab.is_available()

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {key: float(value) for key, value in lab.memory_stats(device).items()}

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Called once, when the class is defined. Without it the class works too, as ``Trainer(accelerator=...())``."""
        accelerator_registry.register("lab", cls, description="Two devices that live in the host's memory")
