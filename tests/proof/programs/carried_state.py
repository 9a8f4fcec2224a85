"""A recurrent network whose hidden state is carried from batch to batch, and saved.

--fault hidden: it starts at zero.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["hidden"])
fault = parser.parse_args().fault

torch.manual_seed(0)
song = torch.linspace(0, 60, 2 * 40 * 8 + 1).sin()
cell, head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
net = nn.ModuleList([cell, head])
optimizer = torch.optim.Adamax(net.parameters(), lr=0.01)
step, hidden = 0, torch.zeros(1, 2, 8)
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step, hidden = saved["step"], hidden if fault else saved["hidden"]

while step < 40:
    heard = torch.stack([song[voice * 320 + step * 8 :][:9] for voice in range(2)]).unsqueeze(2)
    output, hidden = cell(heard[:, :-1], hidden.detach())
    loss = nn.functional.mse_loss(head(output), heard[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 7 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "hidden": hidden.detach()}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
