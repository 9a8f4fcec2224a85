"""torch's AveragedModel as an exponential moving average of the weights.

--fault ema: it is not restored, and starts again from the restored weights.
"""

import argparse
import os

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["ema"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x.cos().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
step, saved = 0, None
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
if saved is not None and fault != "ema":
    average.load_state_dict(saved["average"])

while step < 40:
    rows = slice(step % 16 * 8, step % 16 * 8 + 8)
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(net)
    step += 1
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}
        torch.save({**state, "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(average.state_dict(), "final.pt")
