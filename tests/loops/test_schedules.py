"""Schedulers that watch a value, in a trial of a few batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import LightningModule, Trainer
from drivetrain.errors import NotLoggedError


class Watches(LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = torch.nn.Linear(2, 1), options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


def trial(tmp_path: Path, **options: Any) -> None:
    batches = [torch.ones(1, 2)] * 2
    Trainer(accelerator="cpu", fast_dev_run=True, default_root_dir=tmp_path, enable_progress_bar=False).fit(
        Watches(**options), batches, batches
    )


@pytest.mark.parametrize("options", [{}, {"frequency": 5}, {"interval": "step", "frequency": 3}])
def test_a_trial_looks_up_what_is_not_due_in_it(tmp_path: Path, options: dict[str, Any]) -> None:
    trial(tmp_path, monitor="val_loss", **options)
    with pytest.raises(NotLoggedError, match=r"watches 'val_los', which was not logged.*Logged so far: val_loss"):
        trial(tmp_path, monitor="val_los", **options)


def test_a_scheduler_that_is_not_strict_is_warned_of_in_a_trial(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="watches 'val_los', which was not logged"):
        trial(tmp_path, monitor="val_los", strict=False, frequency=5)
