"""Engine on several processes as programs written for Fabric expect it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Engine, LightningModule
from drivetrain.clusters.local import free_port
from drivetrain.compat.collectives import TorchCollective
from drivetrain.compat.samplers import DistributedSamplerWrapper
from drivetrain.errors import ConfigurationError


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()


class Program(Engine):
    def run(self) -> dict[str, Any]:
        module = Net()
        model, optimizer = self.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        self.backward(model.training_step(torch.full((1, 2), 3.0 + self.global_rank), 0))
        module.clip_gradients(optimizer, 1.0)
        norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
        sampler = DistributedSamplerWrapper([5, 3, 1, 0], shuffle=False)
        loader = self.setup_dataloaders(DataLoader(list(range(6)), batch_size=1, sampler=sampler))
        return {
            "norm": round(norm.item(), 4),
            "gathered": module.all_gather(self.global_rank).tolist(),
            "rank": (module.global_rank, module.trainer.world_size),
            "samples": [batch.item() for batch in loader],
            **exchanged(),
        }


def exchanged() -> dict[str, Any]:
    collective = TorchCollective().setup()  # the group of the job is there
    own, found = torch.tensor([1.0 + collective.rank]), [torch.zeros(1), torch.zeros(1)]
    first = TorchCollective().create_group(ranks=[0])
    first.barrier()  # rank 1 is no member
    first.teardown()
    with pytest.raises(ConfigurationError, match=r"TorchCollective\(op='summ'\) is unknown"):
        collective.all_reduce(own, op="summ")
    return {
        "sum": collective.all_reduce(own.clone()).item(),
        "max": collective.all_reduce(own.clone(), op="MAX").item(),
        "product": collective.all_reduce(own.clone(), op=torch.distributed.ReduceOp.PRODUCT).item(),
        "objects": collective.all_gather_object([None, None], str(collective.rank)),
        "all": torch.cat(collective.all_gather(found, own)).tolist(),
        "sent": collective.broadcast(own.clone(), 1).item(),
        "there": (collective.is_initialized(), TorchCollective.manages_default_group),
    }


def ran() -> dict[str, Any]:
    result: dict[str, Any] = Program(accelerator="cpu", devices=2, strategy="ddp").run()
    return result


def test_a_program_on_two_ranks_uses_its_module_its_collectives_and_its_sampler(pool: Any) -> None:
    both = {
        "norm": 1.0, "gathered": [0, 1], "sum": 3.0, "max": 2.0, "product": 2.0, "objects": ["0", "1"],
        "all": [1.0, 2.0], "sent": 2.0, "there": (True, False),
    }  # fmt: skip
    assert pool.run(ran, group=False) == [
        {**both, "rank": (0, 2), "samples": [5, 1]},
        {**both, "rank": (1, 2), "samples": [3, 0]},
    ]


def made_and_ended(port: int) -> list[bool]:
    with pytest.raises(RuntimeError, match="has no group of its own"):
        TorchCollective().teardown()
    collective = TorchCollective().setup("localhost", str(port), rank=0, world_size=1, backend="gloo")
    seen = [collective.is_initialized(), TorchCollective.manages_default_group]
    TorchCollective().create_group(ranks=[0]).teardown()  # the last group besides that of the job
    return [*seen, collective.is_initialized(), TorchCollective.manages_default_group]


def test_a_collective_makes_and_ends_the_group_of_a_job(pool: Any) -> None:
    assert pool.run(made_and_ended, free_port(), world_size=1, group=False) == [[True, True, False, False]]
