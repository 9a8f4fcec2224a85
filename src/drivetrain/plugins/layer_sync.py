"""``drivetrain.plugins.layer_sync``: see :mod:`drivetrain.strategies`."""

from drivetrain.strategies import LayerSync, TorchSyncBatchNorm

__all__ = ["LayerSync", "TorchSyncBatchNorm"]
