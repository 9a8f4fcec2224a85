"""A small training for a Trainer and for a plain loop: the model, the data, the limits, and what the user's code does.

Nothing here knows of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

SAMPLES, VALIDATION_SAMPLES = 7, 3
HOOKS = ("training_step", "on_train_batch_end", "validation_step", "on_validation_end", "on_train_epoch_end")
FOLDER = "runs"
"""Where ModelCheckpoint and OnExceptionCheckpoint save, below the folder of a test."""


@dataclass(frozen=True)
class Program:
    """What stays the same over all runs.

    Attributes:
        every_n_steps: of ModelCheckpoint; ``None``: each epoch.
        keeps_all: ``save_top_k=-1``.
        saves_on_exception: whether there is an OnExceptionCheckpoint.
    """

    shuffle: bool = False
    dropout: bool = False
    scheduler: str = "none"
    every_n_steps: int | None = None
    keeps_all: bool = False
    save_last: bool = False
    saves_on_exception: bool = False
    sanity: int = 0


@dataclass(frozen=True)
class Limits:
    """What a run may change."""

    max_epochs: int = 2
    max_steps: int = -1
    train_batches: int | float = 1.0
    accumulate: int = 1
    val_interval: int | float = 1.0
    batch_size: int = 2

    def count(self, divided: int = 0) -> int:
        """Return the batches of an epoch whose batches of this size begin at sample ``divided``."""
        batches = self.before(divided) - (-(SAMPLES - divided) // self.batch_size)
        return min(batches, self.train_batches) if isinstance(self.train_batches, int) else batches

    def before(self, divided: int) -> int:
        """Return as how many batches the first ``divided`` samples count, which were trained in others."""
        return max(divided // self.batch_size, 1) if divided else 0

    def samples_in(self, batches: int, divided: int) -> int:
        return min(divided + (batches - self.before(divided)) * self.batch_size, SAMPLES)


@dataclass(frozen=True)
class Event:
    """What the user's code does when a hook is called for the n-th time in a fit.

    Attributes:
        action: "raise", "interrupt" (KeyboardInterrupt), "sigterm", "stop" (``trainer.should_stop``), or the name of a
            file to save.
    """

    hook: str
    count: int
    action: str


def build(program: Program) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.4) if program.dropout else nn.Identity(), nn.Linear(3, 1)
    )


def inputs(samples: int) -> Tensor:
    return torch.stack([torch.linspace(-1, 1, samples), torch.linspace(0, 2, samples).sin()], 1)


def loss_of(net: nn.Module, numbers: Tensor, samples: int = SAMPLES) -> Tensor:
    """Return the loss of the samples with these numbers."""
    x = inputs(samples)[numbers]
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def optimizer_of(net: nn.Module, program: Program) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if program.scheduler == "none":
        return optimizer, None
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def loader_of(program: Program, batch_size: int) -> DataLoader[Any]:
    return DataLoader(range(SAMPLES), batch_size, shuffle=program.shuffle)  # type: ignore[arg-type]


def validation_loader() -> DataLoader[Any]:
    return DataLoader(range(VALIDATION_SAMPLES), 2)  # type: ignore[arg-type]
