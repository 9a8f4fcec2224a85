"""float16 on the processor with a GradScaler whose scale grows until a step overflows and is skipped.

--fault scaler: the scaler is not restored.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["scaler"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=3)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    if fault != "scaler":
        scaler.load_state_dict(saved["scaler"])
    step = saved["step"]

while step < 48:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
