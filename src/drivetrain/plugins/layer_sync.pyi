# The public names, for type checkers and for base/lazy.py.

from drivetrain.strategies import LayerSync as LayerSync
from drivetrain.strategies import TorchSyncBatchNorm as TorchSyncBatchNorm
