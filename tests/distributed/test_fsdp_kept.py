"""FSDP's gathered parameters: kept from forward to backward, and dropped where no backward pass comes."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.strategies import FSDPStrategy
from drivetrain.strategies.sharded_state import is_dtensor

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
KINDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Net(LightningModule):
    """Its step uses parameters that are in no block."""

    policy: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        self.shards: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.blocks(self.before(x))))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        """Call the model twice, and use its own parameter after each."""
        loss = F.mse_loss(self(batch[0]), batch[1]) + self.head.weight.square().sum()
        return loss + self(batch[0] + 1).mean() * self.head.bias.mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.shards.append(all(map(is_dtensor, self.parameters())))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Net):
    """Clears gradients between forward and backward, and looks at its loss between backward and the optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.blocks(self.before(batch[0])).square().mean()
        self.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            self.seen.append(float(self.blocks(batch[0]).square().mean()))
        optimizer.step()


class Weighted(Net):
    """Its windows multiply the gradients that they hold when a batch with another weight comes."""

    def training_step(self, batch: Any, batch_idx: int) -> WeightedLoss:
        return WeightedLoss(super().training_step(batch, batch_idx), batch_idx % 3 + 1)


class InBlocks(Net):
    """None of its parameters is the model's own. Its step calls the model twice, and a pass fails before that."""

    policy = frozenset({nn.Linear})

    def loss(self, batch: Any) -> Tensor:
        with pytest.raises(TypeError):
            self(None)
        return F.mse_loss(self(batch[0]), batch[1]) + self(batch[0] + 1).mean()


class Failing(Net):
    """A pass of its step fails, and it goes on."""

    def loss(self, batch: Any) -> Tensor:
        with pytest.raises(TypeError):
            self(None)
        return super().loss(batch)


class Transposed(Net):
    """One of its weights is not contiguous, as those of convolutions in channels_last are not."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.blocks[1], self.before):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())


def fitted(kind: type[Net], sharding: str | None) -> Any:
    module = kind()
    arguments: dict[str, Any] = {} if kind is Manual else {"accumulate_grad_batches": 2}
    if sharding is not None:
        arguments |= {"strategy": FSDPStrategy(sharding_strategy=sharding, auto_wrap_policy=kind.policy)}
        arguments |= {"devices": 2, "split_batches": True}
    ours = Trainer(
        accelerator="cpu", max_epochs=2, precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(48, 4, generator=generator), torch.randn(48, 1, generator=generator))
    ours.fit(module, DataLoader(samples, batch_size=8), DataLoader(samples, batch_size=8))
    weights = {
        name: (value.full_tensor() if is_dtensor(value) else value).detach().clone()
        for name, value in module.state_dict().items()
    }
    return weights, float(ours.callback_metrics["loss"]), module.shards


@functools.cache
def alone(kind: type[Net]) -> Any:
    return fitted(kind, None)


MODULES = (Net, Manual, Weighted, InBlocks, Failing, Transposed)


def each_module(sharding: str) -> list[Any]:
    return [fitted(kind, sharding) for kind in MODULES]


@pytest.mark.parametrize("sharding", KINDS if LONG else KINDS[:2])
def test_a_forward_pass_without_backward_leaves_shards_and_the_next_one_uses_new_weights(
    pool: Any, sharding: str
) -> None:
    for rank in pool.run(each_module, sharding, group=False):
        for kind, (found, its_loss, shards) in zip(MODULES, rank, strict=True):
            weights, loss, _ = alone(kind)
            torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-9, msg=f"{kind.__name__}: {{}}".format)
            assert its_loss == pytest.approx(loss, rel=1e-9)
            assert shards == [True] * 3  # after the sanity check, and after each epoch


def gathers(sharding: str) -> int:
    """How often a parameter of the model itself is gathered in two batches."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs

    count = itertools.count()
    original = torchs.foreach_all_gather

    def counting(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if any(each._param_fqn == "head.weight" for each in parameters):
            next(count)
        return original(parameters, *args, **kwargs)

    torchs.foreach_all_gather = counting  # type: ignore[assignment]
    try:
        Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, limit_val_batches=0, strategy=FSDPStrategy(sharding_strategy=sharding),
            devices=2,
        ).fit(Net(), DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=2))  # fmt: skip
    finally:
        torchs.foreach_all_gather = original
    return next(count)


def both_gather() -> list[int]:
    return [gathers(sharding) for sharding in KINDS[:2]]


def test_what_is_in_no_block_is_gathered_once_in_a_step(pool: Any) -> None:
    """For forward and backward together, although the step calls the model twice more."""
    assert pool.run(both_gather, group=False) == [[2, 2]] * 2
