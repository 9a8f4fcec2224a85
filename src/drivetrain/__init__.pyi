# The public names, for type checkers and for base/lazy.py.

from drivetrain import accelerators as accelerators
from drivetrain import callbacks as callbacks
from drivetrain import checkpoints as checkpoints
from drivetrain import cli as cli
from drivetrain import clusters as clusters
from drivetrain import compat as compat
from drivetrain import data as data
from drivetrain import engine as engine
from drivetrain import errors as errors
from drivetrain import launchers as launchers
from drivetrain import loggers as loggers
from drivetrain import module as module
from drivetrain import parity as parity
from drivetrain import plugins as plugins
from drivetrain import precision as precision
from drivetrain import profilers as profilers
from drivetrain import strategies as strategies
from drivetrain import testing as testing
from drivetrain import tuner as tuner
from drivetrain.base.seed import seed_everything as seed_everything
from drivetrain.callback import Callback as Callback
from drivetrain.engine.engine import Engine as Engine
from drivetrain.module.datamodule import LightningDataModule as LightningDataModule
from drivetrain.module.losses import WeightedLoss as WeightedLoss
from drivetrain.module.module import LightningModule as LightningModule
from drivetrain.trainer.trainer import Trainer as Trainer

__version__: str
