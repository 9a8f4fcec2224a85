"""What tests of sharded models share: data, a callback that saves, and comparisons of tensors that may be DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from drivetrain import Callback
from drivetrain.strategies.model_parallel import torch_version
from drivetrain.strategies.sharded_state import is_dtensor

NEW_TORCH = torch_version() >= (2, 13)
on_two_dimensions = pytest.mark.skipif(
    not NEW_TORCH, reason="torch 2.9 computes wrong numbers where tensor parallelism and FSDP meet: the strategy warns"
)


def token_data(count: int = 48) -> TensorDataset:
    """Inputs, targets and token counts."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator),
        torch.randint(1, 9, (count,), generator=generator),
    )  # fmt: skip


class Saves(Callback):
    """Saves a checkpoint at the end of one batch, counted from 1 over all epochs of the run."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at, self.batches = path, at, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == self.at:
            trainer.save_checkpoint(self.path)


def whole(value: Any) -> Any:
    """A DTensor as the tensor that it is a part of; every rank must call it."""
    return value.full_tensor() if is_dtensor(value) else value


def near(one: Any, other: Any, msg: Any = None) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=msg)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
