"""Accelerators of the 1.1 generation on two ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters import ClusterEnvironment
from drivetrain.legacy import v1_1


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))


class Net(LightningModule):
    """Adam with a scheduler that steps after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if self._trainer is not None:
            rank = float(os.environ.get("RANK", "0"))
            self.log("rank", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fitted(batch_size: int, cls: Any = Trainer, **arguments: Any) -> tuple[torch.Tensor, Any]:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer, model = cls(max_epochs=2, logger=False, **quiet, **arguments), Net()
    trainer.fit(model, DataLoader(data(), batch_size=batch_size))
    return model.net.weight.detach(), trainer


class OfTheGuide(ClusterEnvironment):
    """The methods that the guide of that time prints."""

    def __init__(self) -> None:
        super().__init__()

    def master_address(self) -> Any:
        if "MASTER_ADDR" not in os.environ:
            rank_zero_warn("MASTER_ADDR is not set; 127.0.0.1 is used.")
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        return os.environ.get("MASTER_ADDR")

    def master_port(self) -> Any:
        if "MASTER_PORT" not in os.environ:
            rank_zero_warn("MASTER_PORT is not set; 12910 is used.")
            os.environ["MASTER_PORT"] = "12910"
        return os.environ.get("MASTER_PORT")

    def world_size(self) -> Any:
        return os.environ.get("WORLD_SIZE")

    def local_rank(self) -> Any:
        return int(os.environ["LOCAL_RANK"])


class MyAccelerator(v1_1.Accelerator):
    """Requires a trainer, and logs what its own ``sync_tensor`` returns."""

    def __init__(self, trainer: Any, cluster_environment: Any = None) -> None:
        super().__init__(trainer, cluster_environment)
        self.nickname = "my_accelerator"
        self.asked: list[Any] = []

    def sync_tensor(self, tensor: Any, group: Any = None, reduce_op: Any = None) -> Any:
        self.asked.append(reduce_op)
        return super().sync_tensor(tensor, group, reduce_op) + 10


class CallsItsStep(v1_1.DDPAccelerator):
    hardware = "cpu"

    def training_step(self, args: Any = None) -> Any:
        return self.trainer.model.training_step(*args)


class CallsTheWrapper(CallsItsStep):
    def training_step(self, args: Any = None) -> Any:
        return self.trainer.model(*args)


NAMED = {
    "DDPAccelerator": {}, "DDPHPCAccelerator": {}, "DDPCPUHPCAccelerator": {}, "DDPSpawnAccelerator": {},
    "DDPCPUSpawnAccelerator": {}, "HorovodAccelerator": {}, "DDP2Accelerator": {"num_nodes": 2, "devices": 1},
}  # fmt: skip


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, more in NAMED.items():
        accelerator = getattr(v1_1, name)()
        accelerator.hardware = "cpu"
        found[name] = fitted(4, accelerator=accelerator, **{"devices": 2, **more})[0]
    sharded = v1_1.DDPAccelerator(ddp_plugin=v1_1.DDPShardedPlugin())
    found["sharded"] = fitted(4, accelerator=sharded, devices=2)[0]
    cluster, accelerator = OfTheGuide(), MyAccelerator()  # type: ignore[call-arg]
    found["own cluster"], trainer = fitted(4, v1_1.Trainer, plugins=[cluster], accelerator=accelerator)
    found["same"] = accelerator.cluster_environment is cluster is trainer.strategy.cluster_environment
    found["logged"] = float(trainer.callback_metrics["rank"])
    found["asked"] = accelerator.asked
    for own in (CallsItsStep, CallsTheWrapper):
        found[own.__name__] = fitted(4, accelerator=own(), devices=2)[0]
    rank_was = os.environ.pop("RANK")
    found["no RANK"], trainer = fitted(4, plugins=[OfTheGuide()], accelerator=CallsTheWrapper(), devices=2)
    os.environ["RANK"] = rank_was
    found["same rank"] = trainer.global_rank == int(rank_was)
    found["usual"] = float(fitted(4, accelerator=v1_1.DDPAccelerator())[1].callback_metrics["rank"])
    return found


@pytest.fixture(scope="module")
def ranks(pool: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(on_ranks, group=False)
    return found


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return fitted(8, accelerator="cpu")[0]


@pytest.mark.parametrize("name", [*NAMED, "sharded", "CallsItsStep", "CallsTheWrapper", "no RANK"])
def test_e3_3_two_ranks_train_to_the_weights_of_one_process_with_the_same_global_batch(
    ranks: list[dict[str, Any]], expected: torch.Tensor, name: str
) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank[name], expected)


def test_e3_2_a_cluster_of_ones_own_trains_and_is_the_accelerators(
    ranks: list[dict[str, Any]], expected: torch.Tensor
) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["own cluster"], expected)
        assert rank["same"]
        assert rank["same rank"]


def test_logged_values_go_through_an_overridden_sync_tensor_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["logged"], rank["asked"]) == (4 * 11.0, ["sum"] * 8)
        assert rank["usual"] == 4 * 1.0


def exchanged() -> dict[str, Any]:
    model, rank = Net(), int(os.environ["RANK"])
    accelerator = v1_1.DDPAccelerator()
    accelerator.hardware = "cpu"
    accelerator.setup(model)
    found: dict[str, Any] = {}
    mine = torch.tensor(rank + 1)
    for operation in (None, "sum", "mean", "avg", torch.distributed.ReduceOp.SUM, "max"):
        found[str(operation)] = accelerator.sync_tensor(mine, reduce_op=operation)
    found["not aliased"] = int(mine) == rank + 1
    found["objects"] = [accelerator.broadcast({"rank": torch.tensor(rank)}, src) for src in (0, 1)]
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    gathered = accelerator.all_gather(x, sync_grads=True)
    (gathered[0].sum() * (rank + 1)).backward()
    found["gathered"], found["grad"] = gathered.detach(), x.grad
    found["without gradients"] = accelerator.all_gather(x).requires_grad
    accelerator.barrier("both are here")
    came = time.monotonic()  # of one machine
    if rank == 1:
        time.sleep(0.2)
    left = time.monotonic()
    accelerator.barrier("wait")
    others = [each for each in accelerator.all_gather(torch.tensor([came, left], dtype=torch.float64))]
    found["waited"] = time.monotonic() >= max(float(each[1]) for each in others)
    found["sampler"] = accelerator.distributed_sampler_kwargs, accelerator.require_distributed_sampler
    [optimizer] = accelerator.optimizers
    batch = [each[rank * 4 : rank * 4 + 4] for each in data().tensors]
    loss = accelerator.training_step([batch, 0])
    accelerator.backward(loss, optimizer, 0)
    assert model.net.weight.grad is not None
    found["exchanged"] = model.net.weight.grad.clone()
    accelerator.teardown()
    return found


def test_c9_s3_7_s3_8_and_s3_9_collectives_in_a_loop_of_ones_own(pool: Any) -> None:
    """sync_tensor alone sums; broadcast honours src; all_gather stacks, and sums gradients."""
    first, second = pool.run(exchanged, group=False)
    for rank in (first, second):
        found = {name: float(rank[name]) for name in ("None", "sum", "mean", "avg", "max")}
        assert found == {"None": 3.0, "sum": 3.0, "mean": 1.5, "avg": 1.5, "max": 2.0}
        assert float(rank[str(torch.distributed.ReduceOp.SUM)]) == 3.0
        assert rank["not aliased"]
        assert rank["objects"] == [{"rank": torch.tensor(0)}, {"rank": torch.tensor(1)}]
        assert torch.equal(rank["gathered"], torch.stack([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]))
        assert rank["without gradients"] is False
        assert rank["waited"]
        assert torch.equal(rank["exchanged"], first["exchanged"])
    assert torch.equal(first["grad"], torch.full((2, 3), 3.0))  # of slice 0: 1 on rank 0 and 2 on rank 1
    assert torch.equal(second["grad"], torch.zeros(2, 3))
    assert [rank["sampler"] for rank in (first, second)] == [
        ({"num_replicas": 2, "rank": 0}, True), ({"num_replicas": 2, "rank": 1}, True),
    ]  # fmt: skip
