"""Programs written for Lightning 2.6 run on drivetrain unchanged.

``drivetrain exec train.py`` (or ``python -m drivetrain.compat train.py``) runs a program as Python would. The program's
imports of ``lightning``, ``pytorch_lightning`` and ``lightning_fabric`` get modules of drivetrain. Alternatively, a
program or a notebook can call :func:`install` before the first import of these packages. Processes that the program
starts also import these packages from drivetrain.

docs/compat.md lists the available names, and :mod:`drivetrain.parity` describes the switches.
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)
