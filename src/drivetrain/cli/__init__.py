""":class:`LightningCLI`, which gives a program a command line, and the command ``drivetrain``
(:mod:`drivetrain.cli.command`).
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)
