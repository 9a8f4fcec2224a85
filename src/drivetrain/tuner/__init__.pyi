# The public names, for type checkers and for base/lazy.py.

from drivetrain.tuner.tuning import Tuner as Tuner
