"""The only module of the core that imports from higher layers: what the core needs of ``compat`` and ``cli``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from drivetrain.base.introspect import is_own_class
from drivetrain.base.registry import load


class FromCompat:
    """A Trainer property with one of Lightning's names, defined in :mod:`drivetrain.compat.loop_views`.

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
    """Convert a Lightning checkpoint to drivetrain's layout; return any other value unchanged.

    Args:
        checkpoint: the data that was read, which is not changed.
        resuming: whether training resumes from it; a warning then names what a Lightning checkpoint lacks.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint or "drivetrain_version" in checkpoint:
        return checkpoint
    return load("drivetrain.compat.earlier_checkpoints:migrate")(checkpoint, resuming)


def field_members() -> ModuleType:
    """Return :mod:`drivetrain.compat.members`: the members of Lightning whose overrides are not called here."""
    return importlib.import_module("drivetrain.compat.members")


def former_hooks() -> ModuleType:
    """Return :mod:`drivetrain.compat.former_hooks`: hooks that Lightning has removed, and what replaces them."""
    return importlib.import_module("drivetrain.compat.former_hooks")


def names_elsewhere() -> ModuleType:
    """Return :mod:`drivetrain.compat.missing`: names of other libraries, and what to write here instead."""
    return importlib.import_module("drivetrain.compat.missing")


def check_part(cls: type) -> None:
    """Check that all overrides in a user's class are called: see :func:`compat.overrides.check_members`."""
    if not is_own_class(cls):
        load("drivetrain.compat.overrides:check_members")(cls)


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments with objects of other APIs replaced: see :mod:`drivetrain.compat.translated`."""
    found: dict[str, Any] = load("drivetrain.compat.translated:translated")(arguments)
    return found


def of_command_line() -> ModuleType:
    """Return :mod:`drivetrain.cli.from_checkpoint`, which rebuilds hyperparameters that LightningCLI has saved."""
    return importlib.import_module("drivetrain.cli.from_checkpoint")
