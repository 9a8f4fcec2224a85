"""The command line of a user's program (:class:`LightningCLI`), and ``drivetrain`` (:mod:`drivetrain.cli.command`)."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
