"""Where and how checkpoints are stored."""

from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
