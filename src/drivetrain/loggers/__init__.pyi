# The public names, for type checkers and for base/lazy.py.

from drivetrain.loggers.comet import CometLogger as CometLogger
from drivetrain.loggers.csv import CSVLogger as CSVLogger
from drivetrain.loggers.dummy import DummyLogger as DummyLogger
from drivetrain.loggers.logger import Logger as Logger
from drivetrain.loggers.logger import LoggerRegistry as LoggerRegistry
from drivetrain.loggers.mlflow import MLFlowLogger as MLFlowLogger
from drivetrain.loggers.neptune import NeptuneLogger as NeptuneLogger
from drivetrain.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from drivetrain.loggers.trackio import TrackioLogger as TrackioLogger
from drivetrain.loggers.wandb import WandbLogger as WandbLogger
