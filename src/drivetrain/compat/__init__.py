"""Programs written for Lightning 2.6 run on drivetrain unchanged.

``drivetrain exec train.py`` (or ``python -m drivetrain.compat train.py``) runs a program as Python would. In this
program, ``import lightning`` imports drivetrain's replacement. The same is true for ``pytorch_lightning`` and
``lightning_fabric``. A program or a notebook can also call :func:`install` before the first ``import lightning``. Child
processes of the program import the replacements, too.

docs/compat.md lists the names that can be imported. :func:`install` accepts switches, which :mod:`drivetrain.parity`
describes.
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)
