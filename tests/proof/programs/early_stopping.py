"""Validation at each third step; the best weights are kept, and the run stops when they are old.

--fault best_metric: a resumed run takes its first validation for the best, and waits from there.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["best_metric"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(160, 8)
y = x.cos().sum(1, keepdim=True) + torch.randn(160, 1)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
step, best, old = 0, float("inf"), 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    if fault != "best_metric":
        best, old = saved["best"], saved["old"]

while step < 200 and old < 8:
    rows = slice(step % 4 * 8, step % 4 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 3 == 0:
        with torch.no_grad():
            metric = nn.functional.mse_loss(net(x[32:]), y[32:]).item()
        old += 1
        if metric < best:
            best, old = metric, 0
            torch.save(net.state_dict(), "best.tmp")
            os.replace("best.tmp", "best.pt")
        print(f"validated {step} metric {metric!r} best {best!r}", flush=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "best": best, "old": old}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(torch.load("best.pt"), "final.pt")
