"""LightningModule, LightningDataModule and Callback of the 1.1 generation: those of the next one, which had the same.

What a module of that time may do besides is to be seen in :mod:`drivetrain.legacy.v1_1.results`.
"""

from __future__ import annotations

from drivetrain.legacy.v1_3.datamodule import LightningDataModule
from drivetrain.legacy.v1_3.module import Callback, LightningModule

__all__ = ["Callback", "LightningDataModule", "LightningModule"]
