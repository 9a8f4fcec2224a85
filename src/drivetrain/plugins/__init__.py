"""The familiar import paths for plugins; the classes live in the folders of what they are."""

from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = ["CheckpointIO", "DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "TorchCheckpointIO"]
