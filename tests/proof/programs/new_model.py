"""A second model with batch norm and an optimizer of its own takes over after nine steps.

--fault buffers: the means and variances of the second model are not restored.
"""

import argparse
import os

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["buffers"])
fault = parser.parse_args().fault


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


step, phase = 0, 0
net, optimizer = made(phase)
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    step, phase = saved["step"], saved["phase"]
    net, optimizer = made(phase)
    kept: dict[str, Tensor] = {
        name: each for name, each in saved["net"].items() if not (fault and phase and "running" in name)
    }
    net.load_state_dict(kept, strict=not fault)
    optimizer.load_state_dict(saved["optimizer"])

while step < 36:
    if step == 9 and phase == 0:
        phase = 1
        net, optimizer = made(phase)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 3 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "phase": phase}
        torch.save(state, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
