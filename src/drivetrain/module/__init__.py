"""LightningModule, LightningDataModule, and what they are built from."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.module.datamodule import LightningDataModule as LightningDataModule
    from drivetrain.module.losses import WeightedLoss as WeightedLoss
    from drivetrain.module.module import LightningModule as LightningModule
    from drivetrain.module.optimizers import LightningOptimizer as LightningOptimizer
