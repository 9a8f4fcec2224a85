"""How batches come: loaders, several of them as one, and the way to the device."""

from drivetrain.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
