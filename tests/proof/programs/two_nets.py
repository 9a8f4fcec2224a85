"""Two networks whose parameters have equal names, in one optimizer, in an order that differs from process to process.

--fault prefix: the checkpoint has other names for the weights of the first, and strict=False passes over that.
"""

import argparse
import os
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["prefix"])
fault = parser.parse_args().fault

torch.manual_seed(0)
nets = {name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for name in ("encoder", "decoder")}
teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)
named = {f"{net}.{name}": each for net in nets for name, each in nets[net].named_parameters()}
order = list(named)[1:]
random.Random(os.getpid()).shuffle(order)
order = [next(iter(named)), *order]
optimizer = torch.optim.Adam([named[name] for name in order], lr=0.01)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    for name, net in nets.items():
        wrong = "module." if fault and name == "encoder" else ""
        net.load_state_dict({f"{wrong}{key}": each for key, each in saved[name].items()}, strict=not wrong)
    for name in order:
        optimizer.state[named[name]] = saved["optimizer"][name]
    step = saved["step"]

while step < 40:
    x = torch.linspace(step, step + 1, 16).view(4, 4).sin()
    loss = nn.functional.mse_loss(nets["decoder"](nets["encoder"](x)), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        state = {name: net.state_dict() for name, net in nets.items()}
        state["optimizer"] = {name: optimizer.state[each] for name, each in named.items()}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save({name: net.state_dict() for name, net in nets.items()}, "final.pt")
