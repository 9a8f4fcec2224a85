"""LightningDataModule of the 1.3 generation."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import drivetrain.module.datamodule
from drivetrain.legacy.v1_3 import arguments, hooks


class LightningDataModule(drivetrain.module.datamodule.LightningDataModule):
    """Today's, with the arguments that every one had, and options for a command line.

    Args:
        train_transforms, val_transforms, test_transforms: kept for the user's own loaders.
        dims: the shape of a sample, kept for the user's own model.
    """

    def __init__(
        self, train_transforms: Any = None, val_transforms: Any = None, test_transforms: Any = None, dims: Any = None
    ) -> None:
        super().__init__()
        self.train_transforms, self.val_transforms = train_transforms, val_transforms
        self.test_transforms, self.dims = test_transforms, dims if dims is not None else ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, {name: hooks.OF_MODULES[name] for name in ("transfer_batch_to_device",)})

    def size(self, dim: int | None = None) -> Any:
        """The shape of a sample, or one dimension of it."""
        return self.dims if dim is None else self.dims[dim]

    @classmethod
    def add_argparse_args(cls, parent_parser: ArgumentParser) -> ArgumentParser:
        """Return a parser with an option for each argument of the constructor."""
        return arguments.add_argparse_args(cls, parent_parser)

    @classmethod
    def from_argparse_args(cls, args: Namespace | ArgumentParser, **kwargs: Any) -> Any:
        """Return a data module with those of its arguments that ``args`` has; ``kwargs`` win."""
        return arguments.from_argparse_args(cls, args, **kwargs)
