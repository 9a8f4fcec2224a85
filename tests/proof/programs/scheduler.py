"""Adam and a schedule that changes the learning rate at each step.

--fault scheduler: the checkpoint is saved before the schedule's step, so that a resumed schedule is one step behind.
--fault optimizer: Adam's moments are not restored.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["scheduler", "optimizer"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
step = 0


def save() -> None:
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "step": step}, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")


if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    if fault != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step = saved["step"]

while step < 40:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 4 == 0 and fault == "scheduler":
        save()
    scheduler.step()
    if step % 4 == 0 and fault != "scheduler":
        save()
torch.save(net.state_dict(), "final.pt")
