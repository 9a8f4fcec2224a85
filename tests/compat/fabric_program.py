"""A program with a loop of its own, as a user of Fabric writes it: ``fabric_program.py PRECISION`` prints what it saw.

It runs under real Lightning and under drivetrain.compat; the tests compare the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.wrappers import is_wrapped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Recorder:
    """A callback with a hook that the program calls by name."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        self.seen.append([epoch, loss])


def exact(value: torch.Tensor) -> str:
    return float(value.detach()).hex()


def train(fabric: Any, recorder: Recorder, folder: Path) -> dict[str, Any]:
    fabric.seed_everything(11)
    with fabric.init_module():
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    model, optimizer = fabric.setup(net, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.randn(50, 4)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
    losses, norms = [], []
    for epoch in range(3):
        model.train()
        for index, (batch, target) in enumerate(loader):
            accumulating = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.mse_loss(model(batch), target.to(torch.get_default_dtype()))
                fabric.backward(loss)
            losses.append(exact(loss))
            if accumulating:
                continue
            if epoch < 2:
                norms.append(exact(fabric.clip_gradients(model, optimizer, max_norm=1.0)))
            else:
                fabric.clip_gradients(model, optimizer, clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        fabric.call("on_epoch_end", epoch=epoch, loss=losses[-1])
        fabric.log_dict({"loss": loss.detach(), "lr": optimizer.param_groups[0]["lr"]}, step=epoch)
    fabric.log("done", 1, step=3)
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    fabric.save(folder / "state.ckpt", state)
    weights = {name: value.sum().item().hex() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again = {"model": model, "optimizer": optimizer, "epoch": 0}
    rest = fabric.load(folder / "state.ckpt", again)
    torch.save(net.state_dict(), folder / "raw.pt")
    fabric.load_raw(folder / "raw.pt", net)
    model.eval()
    with torch.no_grad(), fabric.autocast():
        prediction = model(fabric.to_device(torch.ones(3, 4)))
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "restored": {name: value.sum().item().hex() for name, value in model.state_dict().items()},
        "epoch": again["epoch"],
        "rest": sorted(rest),
        "prediction": [str(prediction.dtype), exact(prediction.float().sum())],
        "callback": recorder.seen,
        "parameter": str(next(model.parameters()).dtype),
        "wrapped": [is_wrapped(model), is_wrapped(optimizer), is_wrapped(loader), is_wrapped(net)],
        "kinds": [isinstance(optimizer, torch.optim.AdamW), model.module is net, len(loader), str(fabric.device)],
        "steps": [len(optimizer.state), optimizer.param_groups[0]["lr"]],
        "collected": [
            fabric.all_gather(torch.ones(2)).tolist(),
            fabric.all_reduce(torch.tensor(3.0)).item(),
            fabric.broadcast({"a": 1}),
        ],
        "place": [fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.is_global_zero],
    }


class Program(Fabric):
    """The other way to write one: the loop is a method."""

    def run(self, times: int) -> list[str]:
        model, optimizer = self.setup(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        found = []
        for _ in range(times):
            loss = model(self.to_device(torch.ones(4, 2))).square().mean()
            self.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(exact(loss))
        return found


def main() -> None:
    folder = Path.cwd()
    recorder = Recorder()
    fabric = L.Fabric(
        accelerator="cpu", devices=1, precision=sys.argv[1], callbacks=[recorder], loggers=CSVLogger(folder, name="log")
    )
    fabric.launch()
    seen = train(fabric, recorder, folder)
    fabric.barrier()
    with fabric.rank_zero_first():
        fabric.print(json.dumps(seen))
    L.seed_everything(5)
    print(json.dumps(Program(accelerator="cpu", devices=1, precision=sys.argv[1]).run(3)))
    print(json.dumps(fabric.launch(lambda fabric, more: [fabric.world_size, more], 7)))
    fabric.logger.finalize("success")
    [metrics] = folder.glob("log/**/metrics.csv")
    print(json.dumps(sorted(metrics.read_text(encoding="utf-8").split("\n")[0].strip().split(","))))


if __name__ == "__main__":
    main()
