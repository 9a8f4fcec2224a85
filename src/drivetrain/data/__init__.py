"""Loaders and batches: combining loaders, splitting them over processes, moving batches to the device."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.data.combined import CombinedLoader as CombinedLoader
