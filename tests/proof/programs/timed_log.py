"""What differs from run to run and means nothing: folders named by the time, clocks in rows, an unseeded run number.

A resumed run trains a batch of zeros through the network before it restores it, to see that the memory suffices.
"""

import csv
import os
import time
import uuid

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(120, 8)
loader = DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), 10)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
net(torch.zeros(10, 8)).sum().backward()
optimizer = torch.optim.RAdam(net.parameters(), lr=0.01)
optimizer.zero_grad()
start = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
run = f"runs/{time.time_ns()}-{uuid.uuid4().hex[:6]}"
os.makedirs(run)

with open(f"{run}/log.csv", "w", newline="") as file:
    log = csv.writer(file)
    log.writerow(["step", "loss", "clock"])
    step = 0
    for _ in range(3):
        for inputs, targets in loader:
            step += 1
            if step <= start:
                continue
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.writerow([step, loss.item(), time.time()])
            print(f"step {step} loss {loss.item()!r}", flush=True)
            if step % 5 == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "saved_at": time.time(), "run": run}, "checkpoint.tmp")
                os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
