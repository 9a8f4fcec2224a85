# The public names, for type checkers and for base/lazy.py.

from drivetrain.cli.argument_parser import LightningArgumentParser as LightningArgumentParser
from drivetrain.cli.class_paths import LRSchedulerCallable as LRSchedulerCallable
from drivetrain.cli.class_paths import OptimizerCallable as OptimizerCallable
from drivetrain.cli.class_paths import ReduceLROnPlateau as ReduceLROnPlateau
from drivetrain.cli.class_paths import instantiate_class as instantiate_class
from drivetrain.cli.lightning_cli import LightningCLI as LightningCLI
from drivetrain.cli.save_config import SaveConfigCallback as SaveConfigCallback
