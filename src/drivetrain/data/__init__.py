"""Loaders and batches: combining loaders, splitting them over processes, moving batches to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.data.combined import CombinedLoader as CombinedLoader

_PUBLIC = {"CombinedLoader": "combined"}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
