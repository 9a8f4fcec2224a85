"""Lightning's ``fabric.strategies.DataParallelStrategy``: one process for several devices, with Fabric's signatures."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drivetrain import strategies as plain
from drivetrain.base.tree import map_leaves
from drivetrain.compat.fabric_strategies import Strategy, constructor
from drivetrain.strategies.collectives import operation_of


class FabricDataParallelStrategy(Strategy, plain.DataParallelStrategy):  # type: ignore[misc]  # Fabric's signatures
    """Uses all devices from one process; see :class:`drivetrain.strategies.DataParallelStrategy`.

    Args:
        accelerator, checkpoint_io, precision: as for every strategy.
        parallel_devices: the devices; the first device has the module; ``None``: as the Engine decides.
    """

    _plain: type = plain.DataParallelStrategy
    cluster_environment = None  # this process is the only process
    __init__ = constructor(plain.DataParallelStrategy, "accelerator", "parallel_devices", "checkpoint_io", "precision")

    def all_reduce(self, collection: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return ``collection`` with the mean of each tensor. A tensor has one value per device."""
        operation_of(reduce_op)
        return map_leaves(_mean, collection) if reduce_op in ("mean", "avg", None) else collection


def _mean(leaf: Any) -> Any:
    return leaf.float().mean().to(leaf.dtype) if isinstance(leaf, Tensor) else leaf
