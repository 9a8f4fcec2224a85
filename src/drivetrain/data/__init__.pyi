# The public names, for type checkers and for base/lazy.py.

from drivetrain.data.combined import CombinedLoader as CombinedLoader
