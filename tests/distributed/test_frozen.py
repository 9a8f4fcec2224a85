"""Checkpoints of trainable weights only, on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x).tanh() + self.adapter(x)


class Adapted(LightningModule):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.blocks(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=0.01)


def fitted(strategy: Any, epochs: int, path: str, resumes: bool = False, seed: int = 1, only: bool = True) -> Any:
    """The weights after a fit, or the error in it."""
    strategy = FSDPStrategy(state_dict_type="sharded") if strategy == "sharded" else strategy
    module = Adapted(seed)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 4, generator=generator))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, save_trainable_only=only,
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=path if resumes else None)
    except (CheckpointError, ConfigurationError) as error:
        return str(error)
    if not resumes:
        trainer.save_checkpoint(path)
    shards: list[Any] = [*module.parameters()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in shards]
    return torch.cat([each.detach().flatten() for each in whole])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fit_resumes_exactly_and_another_base_is_an_error_on_all_ranks(
    pool: Any, strategy: str, tmp_path: Any
) -> None:
    path = str(tmp_path / "adapter.ckpt")
    pool.run(fitted, strategy, 1, path, group=False)
    assert all("adapter" in name for name in torch.load(path)["state_dict"])
    expected = pool.run(fitted, strategy, 2, str(tmp_path / "all.ckpt"), False, 1, False, group=False)[0]
    for found in pool.run(fitted, strategy, 2, path, True, group=False):
        assert torch.equal(found, expected)
    for message in pool.run(fitted, strategy, 2, path, True, 3, group=False):
        assert "has another base" in message
        assert "blocks.0.frozen.weight has other values" in message


def test_shards_are_refused_before_training(pool: Any, tmp_path: Any) -> None:
    for message in pool.run(fitted, "sharded", 1, str(tmp_path / "a.ckpt"), group=False):
        assert 'Write FSDPStrategy(state_dict_type="full")' in message
