"""Several parameter groups; the first layer is frozen at first, and gets a group of its own after fifteen steps."""

import os

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
first, second, last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
first.requires_grad_(False)
groups = [{"params": second.parameters(), "weight_decay": 0.1}, {"params": last.parameters(), "lr": 0.03}]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
step = 0


def unfreeze() -> None:
    first.requires_grad_(True)
    optimizer.add_param_group({"params": first.parameters(), "lr": 0.002})


if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    step = saved["step"]
    if step >= 15:
        unfreeze()
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])

while step < 36:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step == 15:
        unfreeze()
    if step % 5 == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
