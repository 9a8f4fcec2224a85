"""Where and how checkpoints are stored."""

from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO, CheckpointRegistry

__all__ = ["CheckpointIO", "CheckpointRegistry", "TorchCheckpointIO"]
