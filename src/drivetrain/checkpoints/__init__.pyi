# The public names, for type checkers and for base/lazy.py.

from drivetrain.checkpoints.background import AsyncCheckpointIO as AsyncCheckpointIO
from drivetrain.checkpoints.file import TorchCheckpointIO as TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO as CheckpointIO
from drivetrain.checkpoints.io import CheckpointRegistry as CheckpointRegistry
from drivetrain.checkpoints.xla import XLACheckpointIO as XLACheckpointIO
