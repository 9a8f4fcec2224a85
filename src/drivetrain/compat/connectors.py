"""``trainer.connectors`` and ``core.optimizer``: private names that libraries import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drivetrain.plan import resolve
from drivetrain.settings import Settings
from drivetrain.trainer.connector_views import AcceleratorView


class _AcceleratorConnector(AcceleratorView):
    """What a Trainer with these arguments would choose; scvi-tools asks before it makes one.

    Args:
        devices, accelerator: as of the Trainer.
        arguments: other arguments of the Trainer.

    Raises:
        ConfigurationError: there is no such accelerator or device.
    """

    def __init__(self, devices: Any = "auto", *, accelerator: Any = "auto", **arguments: Any) -> None:
        super().__init__(resolve(Settings(accelerator=accelerator, devices=devices, **arguments)))


class _MockOptimizer(torch.optim.Optimizer):
    """An optimizer without parameters, for trying the arguments of a scheduler."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})
        self.param_groups = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``."""
        return None if closure is None else closure()
