"""``drivetrain.plugins.layer_sync``: see :mod:`drivetrain.strategies`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import strategies
from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.strategies import LayerSync as LayerSync
    from drivetrain.strategies import TorchSyncBatchNorm as TorchSyncBatchNorm

_FILES = {name: "..strategies" for name in strategies.__all__ if name.endswith(("LayerSync", "SyncBatchNorm"))}
__all__ = list(_FILES)

lazy(__name__, _FILES)
