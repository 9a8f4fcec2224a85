"""LightningModule, LightningDataModule, and the classes and functions that they are built from."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
