# The public names, for type checkers and for base/lazy.py.

from drivetrain.trainer.trainer import Trainer as Trainer
