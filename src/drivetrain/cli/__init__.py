"""Command lines: for your programs (:class:`LightningCLI`), and drivetrain's own (:mod:`drivetrain.cli.command`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.cli.lightning_cli import (
        LightningArgumentParser,
        LightningCLI,
        LRSchedulerCallable,
        OptimizerCallable,
        ReduceLROnPlateau,
        SaveConfigCallback,
        instantiate_class,
    )

__all__ = [
    "LRSchedulerCallable",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
]

if not TYPE_CHECKING:  # for a type checker, a module's __getattr__ would make every name valid
    __getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "lightning_cli"))
