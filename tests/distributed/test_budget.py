"""What several processes cost a step: no wait for a device, and few calls of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
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


OURS = str(Path(drivetrain.__file__).parent)


class Counted(LightningModule):
    """Counts our own frames above ``training_step``, and our own calls between two of its steps."""

    FIRST, LAST = 20, 120

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = self.frames = self.calls = 0

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.steps == self.FIRST:
            frame: Any = sys._getframe()
            while (frame := frame.f_back) is not None:
                self.frames += frame.f_code.co_filename.startswith(OURS)
            sys.setprofile(self._profile)
        elif self.steps == self.LAST:
            sys.setprofile(None)
        self.steps += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Repeated(Counted):
    """Blocks, which FSDP gathers one at a time."""

    FIRST, LAST = 8, 40

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))  # type: ignore[assignment]


def own_cost(accumulate: int, strategy: str = "ddp") -> tuple[int, float]:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, log_every_n_steps=1000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, limit_train_batches=130 if strategy == "ddp" else 48,
    )  # fmt: skip
    module = Counted() if strategy == "ddp" else Repeated()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(2 * 2 * 130, 4)), batch_size=2))
    return module.frames, module.calls / (module.LAST - module.FIRST)


def test_a_step_of_ddp_has_at_most_7_own_frames_and_20_own_calls(pool: Any) -> None:
    for frames, calls in pool.run(own_cost, 1, group=False):
        assert 5 <= frames <= 7  # fewer than the plain loop has would be a bad count
        assert 10 <= calls <= 20


def test_an_accumulated_batch_of_ddp_adds_one_frame(pool: Any) -> None:
    for frames, calls in pool.run(own_cost, 4, group=False):
        assert frames <= 8
        assert calls <= 22


def test_a_step_of_fsdp_costs_no_more(pool: Any) -> None:
    for frames, calls in pool.run(own_cost, 1, "fsdp", group=False):
        assert 5 <= frames <= 7
        assert 10 <= calls <= 20


def test_an_accumulated_batch_of_fsdp_adds_one_frame(pool: Any) -> None:
    for frames, calls in pool.run(own_cost, 4, "fsdp", group=False):
        assert frames <= 8
        assert calls <= 22
