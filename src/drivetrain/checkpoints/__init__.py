"""Where the bytes of a checkpoint go: one file per place."""

from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
