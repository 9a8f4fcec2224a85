"""Command lines: of programs (:class:`LightningCLI`), and of drivetrain itself (:mod:`drivetrain.cli.command`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from drivetrain.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.lightning_cli"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
