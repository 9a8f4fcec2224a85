"""LightningModule, LightningDataModule and Callback of the 1.1 generation: the same as those of 1.3.

Further results of a 1.1 module's steps are in :mod:`drivetrain.legacy.v1_1.results`.
"""

from __future__ import annotations

from drivetrain.legacy.v1_3.datamodule import LightningDataModule
from drivetrain.legacy.v1_3.module import Callback, LightningModule

__all__ = ["Callback", "LightningDataModule", "LightningModule"]
