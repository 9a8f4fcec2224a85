"""LBFGS, whose closure runs several times in a step."""

import os

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=5)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]


def closure() -> torch.Tensor:
    rows = slice(step % 2 * 32, step % 2 * 32 + 32)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    loss.backward()
    return loss


while step < 30:
    loss = optimizer.step(closure)
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 4 == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
