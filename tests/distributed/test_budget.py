"""Several processes wait for their devices no more often than one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.testing import FakeAccelerator

BATCHES = 11


class Logging(LightningModule):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if self.reads:
            loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def waits(count: int, reads: bool) -> list[str]:
    """Where the host waited for the device between the first step and the last."""
    with FakeAccelerator.recording(2) as record:
        trainer = Trainer(
            accelerator="fake", devices=2, max_epochs=1, log_every_n_steps=1000, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        assert trainer.strategy.root_device.index == trainer.global_rank
        trainer.fit(Logging(reads), DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=2))
        assert trainer.global_step == BATCHES
    return [f"{sync.what} {sync.line}" for sync in record.syncs if 0 < sync.step < BATCHES - 1]


@pytest.mark.parametrize("count", [4 * BATCHES, 4 * BATCHES - 3])
def test_a_step_waits_for_no_device_with_even_and_uneven_ends(pool: Any, count: int) -> None:
    assert pool.run(waits, count, False, group=False) == [[], []]


def test_a_read_in_the_step_is_counted(pool: Any) -> None:
    """The negative control."""
    for found in pool.run(waits, 4 * BATCHES, True, group=False):
        assert len(found) == BATCHES - 2
