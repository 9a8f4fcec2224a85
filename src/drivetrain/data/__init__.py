"""Loaders and batches: combining loaders, splitting them over processes, moving batches to the device."""

from drivetrain.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
