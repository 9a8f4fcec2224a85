"""Accelerators of the 1.3 generation on two ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.legacy.v1_3 import (
    CPUAccelerator,
    DDP2Plugin,
    DDPPlugin,
    DDPShardedPlugin,
    HorovodPlugin,
    NativeMixedPrecisionPlugin,
    PrecisionPlugin,
)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))


class Net(LightningModule):
    """Adam with a scheduler that steps after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        self.types: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x, y = batch
        output = self.net(x)
        self.types.add(output.dtype)
        return F.mse_loss(output, y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fitted(batch_size: int, **arguments: Any) -> tuple[torch.Tensor, set[torch.dtype]]:
    model = Net()
    trainer = Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data(), batch_size=batch_size))
    return model.net.weight.detach(), model.types


PLUGINS = {"ddp": DDPPlugin, "horovod": HorovodPlugin, "sharded": DDPShardedPlugin}


def on_ranks() -> dict[str, Any]:
    found = {}
    for name, plugin in PLUGINS.items():
        accelerator = CPUAccelerator(precision_plugin=PrecisionPlugin(), training_type_plugin=plugin())
        found[name] = fitted(4, accelerator=accelerator, devices=2)
    found["ddp2"] = fitted(4, accelerator=CPUAccelerator(PrecisionPlugin(), DDP2Plugin()), num_nodes=2)
    mixed = CPUAccelerator(NativeMixedPrecisionPlugin("bf16"), DDPPlugin())
    found["mixed"] = fitted(4, accelerator=mixed, devices=2)
    found["modern mixed"] = fitted(4, accelerator="cpu", strategy="ddp", devices=2, precision="bf16-mixed")
    return found


@pytest.fixture(scope="module")
def ranks(pool: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(on_ranks, group=False)
    return found


@pytest.mark.parametrize("name", [*PLUGINS, "ddp2"])
def test_e1_two_ranks_train_to_the_weights_of_one_process_with_the_same_global_batch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    expected, _ = fitted(8, accelerator="cpu")
    for rank in ranks:
        torch.testing.assert_close(rank[name][0], expected)


def test_e1_cpu_twin_trains_under_autocast_as_the_modern_spelling(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["mixed"][1] == {torch.bfloat16}
        assert torch.equal(rank["mixed"][0], rank["modern mixed"][0])


def exchanged() -> dict[str, Any]:
    model, rank = Net(), int(os.environ["RANK"])
    accelerator = CPUAccelerator(PrecisionPlugin(), DDPPlugin([torch.device("cpu")] * 2, find_unused_parameters=False))
    accelerator.connect(model)
    accelerator.setup_environment()
    accelerator.setup(None, model)
    accelerator.pre_dispatch(None)
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    gathered = accelerator.all_gather(x, sync_grads=True)
    (gathered[0].sum() * (rank + 1)).backward()
    found = {"gathered": gathered.detach(), "grad": x.grad}
    found["objects"] = accelerator.broadcast({"rank": torch.tensor(rank)}, src=1)
    [optimizer] = accelerator.optimizers
    batch = [each[rank * 4 : rank * 4 + 4] for each in data().tensors]
    found["grads"] = []
    for accumulate in (True, False):
        loss = accelerator.training_step({"batch": batch, "batch_idx": 0})
        accelerator.backward(loss, optimizer, 0, accumulate)
        assert model.net.weight.grad is not None
        found["grads"].append(model.net.weight.grad.clone())
    accelerator.teardown()
    return found


def test_e2_collectives_and_backward_in_a_loop_of_ones_own(pool: Any) -> None:
    """all_gather stacks and sums gradients, broadcast honours src, should_accumulate leaves gradients to the rank."""
    first, second = pool.run(exchanged, group=False)
    for rank in (first, second):
        assert torch.equal(rank["gathered"], torch.stack([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]))
        assert rank["objects"] == {"rank": torch.tensor(1)}
    assert torch.equal(first["grad"], torch.full((2, 3), 3.0))  # of slice 0: 1 on rank 0 and 2 on rank 1
    assert torch.equal(second["grad"], torch.zeros(2, 3))
    assert not torch.equal(first["grads"][0], second["grads"][0])
    mean = (first["grads"][0] + second["grads"][0]) / 2
    for rank in (first, second):
        torch.testing.assert_close(rank["grads"][1], 2 * mean)
