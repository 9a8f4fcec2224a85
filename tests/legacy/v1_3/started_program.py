"""A program whose accelerator starts two processes by copying this one; prints what it has afterwards."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.legacy import v1_3 as pl


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trained(batch_size, **flags):
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    loader, model = DataLoader(list(data), batch_size=batch_size), Net()
    trainer = pl.Trainer(max_epochs=2, logger=False, num_sanity_val_steps=0, **flags)
    trainer.fit(model, loader, loader)
    results = trainer.validate(model, loader, verbose=False)
    return {
        "weights": model.net.weight.tolist(), "results": results, "kept": trainer.accelerator.results,
        "steps": trainer.global_step,
    }  # fmt: skip


if __name__ == "__main__":
    quiet = {"checkpoint_callback": False, "progress_bar_refresh_rate": 0, "weights_summary": None}
    plugin = pl.CPUAccelerator(pl.PrecisionPlugin(), "ddp_fork")
    started = trained(2, accelerator=plugin, num_processes=2, **quiet)
    print("found", json.dumps([started, trained(4, **quiet)]))
