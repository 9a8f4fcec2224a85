"""Programs written for Lightning 2.6 run on drivetrain unchanged.

``drivetrain exec train.py`` (or ``python -m drivetrain.compat train.py``) runs a program as Python would, and provides
``lightning``, ``pytorch_lightning`` and ``lightning_fabric`` from this package. Inside a program or a notebook
:func:`install` does the same; call it before the first import of one of these packages. Processes that the program
starts import these packages from drivetrain, too.

See docs/compat.md for the names that are available, and :mod:`drivetrain.parity` for the switches.
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)
