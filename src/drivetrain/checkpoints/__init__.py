"""Where and how checkpoints are stored."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.checkpoints.background import AsyncCheckpointIO as AsyncCheckpointIO
    from drivetrain.checkpoints.file import TorchCheckpointIO as TorchCheckpointIO
    from drivetrain.checkpoints.io import CheckpointIO as CheckpointIO
    from drivetrain.checkpoints.io import CheckpointRegistry as CheckpointRegistry
    from drivetrain.checkpoints.xla import XLACheckpointIO as XLACheckpointIO
