"""LightningModule, LightningDataModule, and what they are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.module.datamodule import LightningDataModule as LightningDataModule
    from drivetrain.module.losses import WeightedLoss as WeightedLoss
    from drivetrain.module.module import LightningModule as LightningModule
    from drivetrain.module.optimizers import LightningOptimizer as LightningOptimizer

_PUBLIC = {
    "LightningDataModule": "datamodule",
    "LightningModule": "module",
    "LightningOptimizer": "optimizers",
    "WeightedLoss": "losses",
}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
