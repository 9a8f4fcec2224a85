"""Augmentation with Python's and numpy's random numbers, all of whose states are restored; epochs of shuffle=True.

Checkpoints are saved at the ends of epochs only.

--fault numpy: numpy's state is not restored.
"""

import argparse
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


def collate(rows: list) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack(rows) * random.uniform(0.9, 1.1)
    return x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float(), x.sum(1, keepdim=True)


parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["numpy"])
fault = parser.parse_args().fault

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
loader = DataLoader(list(torch.randn(40, 8)), 10, shuffle=True, collate_fn=collate)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
first_epoch = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", weights_only=False)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch = saved["epoch"]
    random.setstate(saved["random"])
    if not fault:
        np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])

for epoch in range(first_epoch, 9):
    for step, (x, y) in enumerate(loader, epoch * 4 + 1):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    states = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    torch.save({**state, **states}, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
