"""TensorBoard: a resumed run purges the steps behind its checkpoint; rows are flushed before a checkpoint is saved.

--fault logger_step: the steps of a resumed run count from its own start.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["logger_step"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
start = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]

writer = SummaryWriter("tb", purge_step=start + 1)
for step in range(start + 1, 41):
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss.item(), step - start if fault else step)
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        writer.flush()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
writer.close()
torch.save(net.state_dict(), "final.pt")
