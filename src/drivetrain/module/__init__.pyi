# The public names, for type checkers and for base/lazy.py.

from drivetrain.module.datamodule import LightningDataModule as LightningDataModule
from drivetrain.module.losses import WeightedLoss as WeightedLoss
from drivetrain.module.module import LightningModule as LightningModule
from drivetrain.module.optimizers import LightningOptimizer as LightningOptimizer
