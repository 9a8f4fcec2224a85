# The public names, for type checkers and for base/lazy.py.

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
