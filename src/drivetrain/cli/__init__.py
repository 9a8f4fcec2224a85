"""Command lines: for your programs (:class:`LightningCLI`), and drivetrain's own (:mod:`drivetrain.cli.command`)."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
