"""Batch normalization, whose buffers are in no optimizer, and a validation after each epoch.

--fault buffers: they are not restored.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["buffers"])
fault = parser.parse_args().fault

torch.manual_seed(0)
x = torch.randn(80, 1, 6, 6)
y = (x.sum((1, 2, 3)) > 0).long()
train, validation = TensorDataset(x[:60], y[:60]), DataLoader(TensorDataset(x[60:], y[60:]), 20)
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
first_epoch = done = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    if fault:
        saved["net"] = {name: value for name, value in saved["net"].items() if name in dict(net.named_parameters())}
    net.load_state_dict(saved["net"], strict=not fault)
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch, done = divmod(saved["step"], 6)

for epoch in range(first_epoch, 6):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).tolist()
    net.train()
    for step, (inputs, labels) in enumerate(DataLoader(train, 10, sampler=order[done * 10 :]), epoch * 6 + done + 1):
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 6 == 3:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
    done = 0
    net.eval()
    with torch.no_grad():
        for inputs, labels in validation:
            right = (net(inputs).argmax(1) == labels).float().mean().item()
    print(f"validated {epoch} accuracy {right!r}", flush=True)
torch.save(net.state_dict(), "final.pt")
