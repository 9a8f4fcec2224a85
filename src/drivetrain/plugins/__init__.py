"""Lightning's import paths for plugins; the classes are defined in their own folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy
from drivetrain.plugins import io, layer_sync, precision

if TYPE_CHECKING:
    from drivetrain.checkpoints import AsyncCheckpointIO as AsyncCheckpointIO
    from drivetrain.checkpoints import CheckpointIO as CheckpointIO
    from drivetrain.checkpoints import TorchCheckpointIO as TorchCheckpointIO
    from drivetrain.checkpoints import XLACheckpointIO as XLACheckpointIO
    from drivetrain.plugins import environments as environments
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

_FILES = {
    **dict.fromkeys(io.__all__, "io"),
    **dict.fromkeys(layer_sync.__all__, "layer_sync"),
    **dict.fromkeys(precision.__all__, "precision"),
}
__all__ = list(_FILES)

lazy(__name__, _FILES, ("environments", "io", "layer_sync", "precision"))
