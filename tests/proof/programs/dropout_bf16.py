"""Dropout under bfloat16 autocast, AdamW in one fused kernel; the random state is restored.

--fault dropout: it is not restored.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["dropout"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    if fault != "dropout":
        torch.set_rng_state(saved["random"])
    step = saved["step"]

while step < 40:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 6 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
