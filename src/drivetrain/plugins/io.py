"""``drivetrain.plugins.io``: see :mod:`drivetrain.checkpoints`."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.checkpoints import AsyncCheckpointIO as AsyncCheckpointIO
    from drivetrain.checkpoints import CheckpointIO as CheckpointIO
    from drivetrain.checkpoints import TorchCheckpointIO as TorchCheckpointIO
    from drivetrain.checkpoints import XLACheckpointIO as XLACheckpointIO
