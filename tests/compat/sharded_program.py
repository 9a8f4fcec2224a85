"""A loop of one's own with ModelParallelStrategy: ``sharded_program.py DATA TENSOR FILE`` prints what rank 0 saw.

It writes a checkpoint to FILE, or reads one that is there. It runs under real Lightning and under drivetrain.compat;
the tests compare the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(self.first(x).relu())
        return result


def parallelize(model: Any, mesh: Any) -> Any:
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    for block in model[:2]:
        if tensor.size() > 1:
            parallelize_module(block, tensor, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if data.size() > 1:
            fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data) if data.size() > 1 else model


def main() -> None:
    data, tensor, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    strategy = ModelParallelStrategy(parallelize, data, tensor, save_distributed_checkpoint=False)
    fabric = L.Fabric(accelerator="cpu", devices=data * tensor, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    with fabric.init_module(empty_init=False):
        net = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
    model = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))
    losses = []

    def epoch() -> None:
        for index, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = F.mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            losses.append(round(fabric.all_reduce(loss.detach()).item(), 6))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    state = {"model": model, "optimizer": optimizer, "epoch": 1}
    if path.exists():
        state["epoch"] = 0
        fabric.load(path, state)
    else:
        epoch()
        fabric.save(path, state)
    epoch()
    whole = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in net.parameters()
    ]
    if fabric.is_global_zero:
        sums = [round(each.double().abs().sum().item(), 5) for each in whole]
        print(json.dumps({"losses": losses[-8 // data :], "sums": sums, "epoch": state["epoch"]}))


if __name__ == "__main__":
    main()
