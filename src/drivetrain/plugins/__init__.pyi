# The public names, for type checkers and for base/lazy.py.

from drivetrain.checkpoints import AsyncCheckpointIO as AsyncCheckpointIO
from drivetrain.checkpoints import CheckpointIO as CheckpointIO
from drivetrain.checkpoints import TorchCheckpointIO as TorchCheckpointIO
from drivetrain.checkpoints import XLACheckpointIO as XLACheckpointIO
from drivetrain.plugins import environments as environments
from drivetrain.plugins import io as io
from drivetrain.plugins import layer_sync as layer_sync
from drivetrain.plugins import precision as precision
from drivetrain.precision import BitsandbytesPrecision as BitsandbytesPrecision
from drivetrain.precision import DeepSpeedPrecision as DeepSpeedPrecision
from drivetrain.precision import DoublePrecision as DoublePrecision
from drivetrain.precision import Float8Precision as Float8Precision
from drivetrain.precision import FSDPPrecision as FSDPPrecision
from drivetrain.precision import HalfPrecision as HalfPrecision
from drivetrain.precision import MixedPrecision as MixedPrecision
from drivetrain.precision import Precision as Precision
from drivetrain.precision import TransformerEnginePrecision as TransformerEnginePrecision
from drivetrain.precision import XLAPrecision as XLAPrecision
from drivetrain.strategies import LayerSync as LayerSync
from drivetrain.strategies import TorchSyncBatchNorm as TorchSyncBatchNorm
