"""LightningModule, LightningDataModule, and what they are built from."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
