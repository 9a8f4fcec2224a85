"""What the mistakes share: quiet Trainers and small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

Mistakes = dict[str, Callable[[], Any]]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
LONG: dict[str, Any] = {"fast_dev_run": False, "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
"""A run with validation that is no trial, for callbacks that a trial leaves out."""


def make(**arguments: Any) -> Any:
    """A Trainer without output."""
    return pl.Trainer(**{**QUIET, **arguments})


def fit(model: Any = None, **arguments: Any) -> None:
    """Train two batches."""
    make(**{"fast_dev_run": 2, **arguments}).fit(BoringModel() if model is None else model)


def one(**members: Any) -> Any:
    """A model that trains, with these members."""
    return type("Model", (BoringModel,), members)()


def manual(**members: Any) -> Any:
    """The same under manual optimization."""

    def __init__(self: Any) -> None:
        BoringModel.__init__(self)
        self.automatic_optimization = False

    return one(__init__=__init__, **{"training_step": lambda self, batch, batch_idx: None, **members})


def step(action: Callable[[Any], Any], **members: Any) -> Any:
    """A model whose training step first does ``action(self)``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        action(self)
        return self.step(batch)

    return one(training_step=training_step, **members)


def logs(*arguments: Any, **options: Any) -> Any:
    """A model whose training step logs this."""
    return step(lambda self: self.log(*arguments, **options))


def optimized(configure: Callable[[Any, Any], Any]) -> Any:
    """A model whose ``configure_optimizers`` returns ``configure(self, optimizer)``."""

    def configure_optimizers(self: Any) -> Any:
        return configure(self, torch.optim.SGD(self.parameters(), lr=0.1))

    return one(configure_optimizers=configure_optimizers)


def plateau(**config: Any) -> Any:
    """A model with a ReduceLROnPlateau in this configuration."""

    def configure(self: Any, optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}

    return optimized(configure)


def loader(samples: int = 8, **options: Any) -> Any:
    """A loader of random samples."""
    return DataLoader(RandomDataset(32, samples), **options)


def saved(name: str = "a.ckpt", model: Any = None, **arguments: Any) -> str:
    """The path of a checkpoint of a short fit."""
    trainer = make(**{**LONG, **arguments})
    trainer.fit(BoringModel() if model is None else model)
    trainer.save_checkpoint(name)
    return name


def wider() -> Any:
    """A model that has one layer more."""

    def __init__(self: Any) -> None:
        BoringModel.__init__(self)
        self.more = torch.nn.Linear(2, 2)

    return one(__init__=__init__)
