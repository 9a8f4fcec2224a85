"""The one door from the core to what stands above it: what it needs of ``compat`` and ``cli`` is named here only."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from drivetrain.base.registry import load


class FromCompat:
    """A property of the Trainer under one of Lightning's names, which :mod:`drivetrain.compat.loop_views` defines.

    The module is imported when the property is first read or written, so that importing the Trainer stays quick.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._property().__get__(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        self._property().__set__(trainer, value)

    def _property(self) -> Any:
        return vars(load("drivetrain.compat.loop_views:ViewsOfTrainer"))[self._name]


def in_our_layout(checkpoint: Any, resuming: bool = False) -> Any:
    """Return a checkpoint of Lightning's in drivetrain's layout; anything else as it is.

    Args:
        checkpoint: what was read; it is left as it is.
        resuming: whether training resumes from it; then a warning names what a file of Lightning's lacks.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint or "drivetrain_version" in checkpoint:
        return checkpoint
    return load("drivetrain.compat.earlier_checkpoints:migrate")(checkpoint, resuming)


def field_members() -> ModuleType:
    """Return :mod:`drivetrain.compat.members`: which members of Lightning's an override of is not called here."""
    return importlib.import_module("drivetrain.compat.members")


def of_command_line() -> ModuleType:
    """Return :mod:`drivetrain.cli.from_checkpoint`: hyperparameters that LightningCLI has saved, built again."""
    return importlib.import_module("drivetrain.cli.from_checkpoint")
