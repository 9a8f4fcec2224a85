# The public names, for type checkers and for base/lazy.py.

from drivetrain.compat.installing import install as install
from drivetrain.compat.installing import uninstall as uninstall
