"""Whatever device torch itself was built for, by torch's own name for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.errors import ConfigurationError


class TorchDeviceAccelerator(Accelerator):
    """The device behind ``torch.accelerator``: a GPU of any maker, or a backend from outside torch.

    No backend is named here: the type, the count and the module come from torch.
    """

    @staticmethod
    def device_type() -> str:
        """torch's name for the device, for example the one in ``tensor.device.type``."""
        current = torch.accelerator.current_accelerator()
        if current is None:
            raise ConfigurationError('This build of torch sees no accelerator. Write accelerator="cpu".')
        return current.type

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """n: the first n; -1: all; ``[i, j]`` or ``"i,j"``: those; a text of digits is a count."""
        count = torch.accelerator.device_count()
        given = devices
        if isinstance(devices, str):
            parts = [part.strip() for part in devices.split(",") if part.strip()]
            if parts and all(part.removeprefix("-").isdigit() for part in parts):
                devices = [int(part) for part in parts] if "," in devices else int(parts[0])
        if isinstance(devices, int):
            devices = list(range(count if devices == -1 else devices))
        if not isinstance(devices, (list, tuple)) or not all(type(index) is int for index in devices):
            raise ConfigurationError(
                f'devices={given!r} is no list of device numbers. Write devices=1, "0,1" or "auto".'
            )
        indices = list(devices)
        if not indices or len(set(indices)) != len(indices) or not all(0 <= i < count for i in indices):
            raise ConfigurationError(
                f"devices names {indices}, but this machine has {count} device(s), numbered from 0. "
                "Name each device once, or write devices=-1 for all."
            )
        return indices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        kind = TorchDeviceAccelerator.device_type()
        return [torch.device(kind, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @property
    def name(self) -> str:
        return self.device_type()

    @property
    def supports_float64(self) -> bool:  # type: ignore[override]  # a fact of the machine here, not of the class
        return self.device_type() != "mps"

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """The allocator's counters, as ``memory_stats`` of the backend's module reports them."""
        stats = getattr(torch.get_device_module(device), "memory_stats", None)
        return {} if stats is None else {key: float(value) for key, value in stats(device).items()}

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        empty_cache = getattr(torch.get_device_module(self.device_type()), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()
