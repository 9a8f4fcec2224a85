# The public names, for type checkers and for base/lazy.py.

from drivetrain.compat.precisions import DeepSpeedPrecision as DeepSpeedPrecision
from drivetrain.compat.precisions import FSDPPrecision as FSDPPrecision
from drivetrain.precision.bitsandbytes import BitsandbytesPrecision as BitsandbytesPrecision
from drivetrain.precision.double import DoublePrecision as DoublePrecision
from drivetrain.precision.float8 import Float8Precision as Float8Precision
from drivetrain.precision.half import HalfPrecision as HalfPrecision
from drivetrain.precision.mixed import MixedPrecision as MixedPrecision
from drivetrain.precision.precision import Precision as Precision
from drivetrain.precision.precision import PrecisionRegistry as PrecisionRegistry
from drivetrain.precision.transformer_engine import TransformerEnginePrecision as TransformerEnginePrecision
from drivetrain.precision.xla import XLAPrecision as XLAPrecision
