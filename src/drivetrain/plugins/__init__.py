"""The familiar import paths for plugins; the classes live in the folders of what they are."""

from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from drivetrain.strategies import LayerSync, TorchSyncBatchNorm

__all__ = [
    "CheckpointIO",
    "DoublePrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
]
