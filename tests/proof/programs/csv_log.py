"""Rows in a CSV file; a resumed run cuts the file back to its checkpoint and continues the steps.

--fault logger_step: the steps of a resumed run's rows count from its own start.
"""

import argparse
import csv
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["logger_step"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
start = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    with open("metrics.csv") as file:
        kept = file.readlines()[: 1 + start]
else:
    kept = ["step,loss\n"]
with open("metrics.tmp", "w") as file:
    file.writelines(kept)
os.replace("metrics.tmp", "metrics.csv")

with open("metrics.csv", "a", newline="") as file:
    log = csv.writer(file, lineterminator="\n")
    for step in range(start + 1, 41):
        rows = slice(step % 16 * 8, step % 16 * 8 + 8)
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.writerow([step - start if fault else step, loss.item()])
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 5 == 0:
            file.flush()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
