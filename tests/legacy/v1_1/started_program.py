"""A program that trains in the ways that its arguments name, most of which start processes; prints what it has then."""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.legacy import v1_1 as pl


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Forked(pl.DDPCPUSpawnAccelerator):
    strategy_name = "ddp_fork"


def trained(batch_size, **flags):
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    loader, model = DataLoader(list(data), batch_size=batch_size), Net()
    quiet = {"checkpoint_callback": False, "progress_bar_refresh_rate": 0, "weights_summary": None}
    trainer = pl.Trainer(max_epochs=2, logger=False, **quiet, **flags)
    trainer.fit(model, loader)
    results = trainer.test(model, test_dataloaders=loader, verbose=False)
    return {"weights": model.net.weight.tolist(), "results": results, "steps": trainer.global_step}


if __name__ == "__main__":
    kinds = {
        "alone": lambda: {},
        "fork": lambda: {"accelerator": Forked(None, 2)},
        "spawn": lambda: {"accelerator": pl.DDPCPUSpawnAccelerator(nprocs=2)},
        "ddp_spawn": lambda: {"accelerator": "ddp_spawn", "num_processes": 2},
        "ddp": lambda: {"accelerator": "ddp", "num_processes": 2},
    }
    found = {name: trained(4 if name == "alone" else 2, **kinds[name]()) for name in sys.argv[1:]}
    if os.environ.get("RANK", "0") == "0":
        print("found", json.dumps(found))
