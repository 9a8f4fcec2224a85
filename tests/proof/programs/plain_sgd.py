"""SGD with momentum. The order of an epoch depends on its number alone; global random state is not restored.

--fault step: the saved number is one too small, so that a batch is trained twice.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["step"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(96, 8)
y = x.sin().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]

while step < 36:
    epoch, place = divmod(step, 12)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * 8 : place * 8 + 8]
    loss = nn.functional.mse_loss(net(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step - 1 if fault else step}
        torch.save(state, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
