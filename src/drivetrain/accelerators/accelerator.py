"""The contract of a device kind (spec S0-1 to S0-10)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class Accelerator(ABC):
    """Connects a program to one kind of hardware.

    Five members are required; the rest have working defaults. Instances hold no state of a run, so one may serve
    several Trainers.
    """

    supports_float64: bool = True
    """Whether tensors of 64-bit floats exist there; epoch means are summed in 32 bits where they do not."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """What the user wrote as ``devices`` in this accelerator's own terms; an int ``n`` means the first n.

        Raises:
            ConfigurationError: there is no such device.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        """The torch devices for a parsed specification, in rank order."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """How many devices ``devices="auto"`` means."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Whether this machine has such a device and torch can use it."""

    @abstractmethod
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Figures about ``device`` now; never synchronises with it."""

    @property
    def name(self) -> str:
        """The name in plans and messages: the class name in lower case without the word Accelerator."""
        return type(self).__name__.removesuffix("Accelerator").lower() or "accelerator"

    @property
    def autocast_device_type(self) -> str:
        """The ``device_type`` of ``torch.autocast`` there (spec C4)."""
        return self.get_parallel_devices([0])[0].type

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` current. Called before any process group or model exists."""

    def setup(self, trainer: Any) -> None:
        """Called first when the strategy sets the model up."""

    def teardown(self) -> None:
        """Called last when a run ends, also after an exception."""
