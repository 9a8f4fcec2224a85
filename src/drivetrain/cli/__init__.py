"""Command lines: for your programs (:class:`LightningCLI`), and drivetrain's own (:mod:`drivetrain.cli.command`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.cli.argument_parser import LightningArgumentParser as LightningArgumentParser
    from drivetrain.cli.class_paths import LRSchedulerCallable as LRSchedulerCallable
    from drivetrain.cli.class_paths import OptimizerCallable as OptimizerCallable
    from drivetrain.cli.class_paths import ReduceLROnPlateau as ReduceLROnPlateau
    from drivetrain.cli.class_paths import instantiate_class as instantiate_class
    from drivetrain.cli.lightning_cli import LightningCLI as LightningCLI
    from drivetrain.cli.save_config import SaveConfigCallback as SaveConfigCallback

_FILES = {
    "LRSchedulerCallable": "class_paths",
    "LightningArgumentParser": "argument_parser",
    "LightningCLI": "lightning_cli",
    "OptimizerCallable": "class_paths",
    "ReduceLROnPlateau": "class_paths",
    "SaveConfigCallback": "save_config",
    "instantiate_class": "class_paths",
}
__all__ = list(_FILES)

lazy(__name__, _FILES)
