# The public names, for type checkers and for base/lazy.py.

from drivetrain.logbook.logbook import Logbook as Logbook
