"""Layers that exchange their statistics between ranks: the contract, and the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from drivetrain.base.registry import Registry, names_itself


class LayerSync(ABC):
    """Changes the layers of a model during a fit on several ranks, and restores the layers afterwards.

    Attributes:
        group: the process group of the ranks that see different samples, set before :meth:`apply`; ``None``: all ranks.
    """

    group: Any = None

    @classmethod
    def register_layer_syncs(cls, layer_sync_registry: Registry[LayerSync]) -> None:
        """Call ``layer_sync_registry.register("name", cls, description="...")`` for each name of the class.

        Called once, when a subclass that defines this method is created. No other registration is necessary.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_itself(cls, "register_layer_syncs", LayerSyncRegistry)

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with layers that exchange their statistics. Called before the strategy wraps ``model``."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with its original layers. Called when the fit ends, also after an exception."""

    def count_batches(self, model: nn.Module, counts: bool) -> None:
        """Set whether the statistics include this rank's next batches. ``counts`` is False while the rank repeats
        batches because other ranks have more batches.
        """


LayerSyncRegistry: Registry[LayerSync] = Registry(
    "drivetrain.strategies", "layer_sync", "layer sync", by_file=False, group="drivetrain.layer_syncs"
)
"""The LayerSync classes by name: drivetrain's own, the users', and those of installed packages."""
