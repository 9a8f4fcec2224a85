"""DataLoader(shuffle=True): the generator as of the epoch's start is saved, batches behind the position are skipped.

The last batch of an epoch is smaller, and the run stops in the middle of an epoch.

--fault sampler_seed: the generator is not restored.
--fault shuffled_twice: it is saved as it is in the middle of an epoch, so that a resumed epoch is shuffled again.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["sampler_seed", "shuffled_twice"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(77, 8)
generator = torch.Generator().manual_seed(5)
loader = DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), 8, shuffle=True, generator=generator)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
step = done = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step, done = saved["step"], saved["done"]
    if fault != "sampler_seed":
        generator.set_state(saved["generator"])

while step < 37:
    at_start = generator.get_state()
    for index, (inputs, targets) in enumerate(loader):
        if index < done:
            continue
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 4 == 0:
            order = generator.get_state() if fault == "shuffled_twice" else at_start
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "generator": order}
            torch.save({**state, "step": step, "done": index + 1}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
        if step == 37:
            break
    done = 0
torch.save(net.state_dict(), "final.pt")
