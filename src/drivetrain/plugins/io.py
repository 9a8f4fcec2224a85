"""``drivetrain.plugins.io``: see :mod:`drivetrain.checkpoints`."""

from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
