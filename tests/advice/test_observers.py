"""Observers on the hook table: called after all parties, in phases that have no hook too, and never in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain import Callback, LightningModule

SEEN: list[str] = []


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self) -> None:
        SEEN.append("module")


class Looks:
    """Writes down each name by which it is called."""

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any) -> Any:
            SEEN.append(name)
            return args[0] if args else None  # the step, which an observer may replace

        return note


class Registers(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.hooks.observers.append(Looks())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        SEEN.append("callback")


def test_an_observer_is_called_after_all_parties_and_not_in_steps(make_trainer: Any, loader: Any) -> None:
    SEEN.clear()
    make_trainer(callbacks=Registers(), num_sanity_val_steps=0).fit(Net(), loader, loader)
    assert SEEN == [
        "on_fit_start", "on_train_start", "on_train_epoch_start", "step_bound", "before_validation",
        "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "results_agreed",
        "on_validation_end",
        "batches_ended", "callback", "module", "on_train_epoch_end", "values_left", "epoch_closed", "on_train_end",
    ]  # fmt: skip


def test_a_run_that_is_over_keeps_no_observer(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer()
    trainer.fit(Net(), loader, loader)
    assert trainer.hooks.observers == []
