"""Two phases: SGD at first, then a new AdamW for the same weights, with a warm-up of its own."""

import os

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
step, saved = 0, None
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    step = saved["step"]

for phase in (0, 1):
    last = 18 * (phase + 1)
    if step >= last:
        continue
    optimizer = (torch.optim.SGD, torch.optim.AdamW)[phase](net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    if saved is not None and saved["phase"] == phase:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    while step < last:
        rows = slice(step % 16 * 8, step % 16 * 8 + 8)
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 5 == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save({**state, "step": step, "phase": phase}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
