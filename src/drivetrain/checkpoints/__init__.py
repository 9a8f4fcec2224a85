"""Where and how checkpoints are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.checkpoints.background import AsyncCheckpointIO as AsyncCheckpointIO
    from drivetrain.checkpoints.file import TorchCheckpointIO as TorchCheckpointIO
    from drivetrain.checkpoints.io import CheckpointIO as CheckpointIO
    from drivetrain.checkpoints.io import CheckpointRegistry as CheckpointRegistry
    from drivetrain.checkpoints.xla import XLACheckpointIO as XLACheckpointIO

_PUBLIC = {
    "AsyncCheckpointIO": "background",
    "CheckpointIO": "io",
    "CheckpointRegistry": "io",
    "TorchCheckpointIO": "file",
    "XLACheckpointIO": "xla",
}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
