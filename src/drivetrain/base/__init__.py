"""Helpers that two or more folders use. They import torch and the standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if not TYPE_CHECKING:  # for a type checker, a module's __getattr__ would make every name valid
    __getattr__, _ = lazy(__name__, {})
