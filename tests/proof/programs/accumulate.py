"""Gradients of four batches for each optimizer step; checkpoints in the middle of a window keep the gradients so far.

--fault gradient_window: the accumulated gradients are lost.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["gradient_window"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
batch = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    if fault != "gradient_window":
        for parameter, gradient in zip(net.parameters(), saved["gradients"], strict=True):
            parameter.grad = gradient
    batch = saved["batch"]

while batch < 144:
    rows = slice(batch % 16 * 8, batch % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    (loss / 4).backward()
    batch += 1
    if batch % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {batch // 4} loss {loss.item()!r}", flush=True)
    if batch % 6 == 0:
        gradients = [parameter.grad for parameter in net.parameters()]
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients}
        torch.save({**state, "batch": batch}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
