# The public names, for type checkers and for base/lazy.py.

from drivetrain.engine.engine import Engine as Engine
