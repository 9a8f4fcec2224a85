"""``drivetrain.plugins.io``: see :mod:`drivetrain.checkpoints`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import checkpoints
from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.checkpoints import AsyncCheckpointIO as AsyncCheckpointIO
    from drivetrain.checkpoints import CheckpointIO as CheckpointIO
    from drivetrain.checkpoints import TorchCheckpointIO as TorchCheckpointIO
    from drivetrain.checkpoints import XLACheckpointIO as XLACheckpointIO

_FILES = {name: "..checkpoints" for name in checkpoints.__all__ if name.endswith("IO")}
__all__ = list(_FILES)

lazy(__name__, _FILES)
