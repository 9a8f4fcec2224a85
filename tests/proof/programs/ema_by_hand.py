"""A moving average kept by hand, in a dictionary of tensors; its loss is logged to a file of JSON lines.

--fault ema: the average is not restored.
"""

import argparse
import json
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["ema"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01)
step, log = 0, []
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step, log = saved["step"], saved["log"]
average = {name: value.clone() for name, value in net.state_dict().items()}
if step and fault != "ema":
    average = saved["average"]
with open("log.jsonl", "w") as file:
    file.writelines(log)

while step < 40:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for name, value in net.state_dict().items():
        average[name].lerp_(value, 0.1)
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 4 == 0:
        with torch.no_grad():
            averaged = nn.functional.mse_loss(torch.func.functional_call(net, average, x), y)
        log.append(json.dumps({"step": step, "loss": loss.item(), "averaged": averaged.item()}) + "\n")
        with open("log.jsonl", "a") as file:
            file.write(log[-1])
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "average": average}
        torch.save({**state, "step": step, "log": log}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(average, "final.pt")
