# The public names, for type checkers and for base/lazy.py.

from drivetrain.checkpoints import AsyncCheckpointIO as AsyncCheckpointIO
from drivetrain.checkpoints import CheckpointIO as CheckpointIO
from drivetrain.checkpoints import TorchCheckpointIO as TorchCheckpointIO
from drivetrain.checkpoints import XLACheckpointIO as XLACheckpointIO
