"""``drivetrain.plugins.layer_sync``: see :mod:`drivetrain.strategies`."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.strategies import LayerSync as LayerSync
    from drivetrain.strategies import TorchSyncBatchNorm as TorchSyncBatchNorm
