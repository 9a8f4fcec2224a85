"""LightningModule, LightningDataModule, and their base classes and helpers."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
