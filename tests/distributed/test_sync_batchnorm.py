"""Trainer(sync_batchnorm=True): models with batch norm train on several processes as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(batch_size: int, count: int, synchronises: bool) -> tuple[torch.Tensor, float, list[str]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))
    module = Normed()
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=2, sync_batchnorm=synchronises, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(data, batch_size, shuffle=True), DataLoader(data, batch_size))
    everything = torch.cat([tensor.flatten().double() for tensor in module.state_dict().values()])
    return everything, float(trainer.callback_metrics["val_loss"]), [type(layer).__name__ for layer in module.net]


@pytest.mark.parametrize(("world_size", "count"), [(2, 48), (3, 48), (2, 45), (3, 38)])
def test_batch_norm_sees_the_global_batch(pool: Any, world_size: int, count: int) -> None:
    """Weights, statistics and validation; also where the last global batch is uneven, or too small for all ranks."""
    [(expected, metric, layers)] = pool.run(fitted, 12, count, False, world_size=1)
    for found, mine, kinds in pool.run(fitted, 12 // world_size, count, True, world_size=world_size):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        assert mine == pytest.approx(metric, rel=1e-9)
        assert kinds == layers  # of the classes that they had before


def test_without_it_each_rank_normalizes_by_its_own_batch(pool: Any) -> None:
    """The negative control. Validation judges rank 0's statistics, which a checkpoint would hold, on every rank."""
    [(expected, _, _)] = pool.run(fitted, 12, 48, False, world_size=1)
    (first, metric, _), (second, same, _) = pool.run(fitted, 6, 48, False, world_size=2)
    assert (first - expected).abs().max() > 1e-3
    assert torch.equal(first, second)
    assert metric == same
