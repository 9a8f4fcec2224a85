"""The older pattern: --resume names a checkpoint, one is saved after each epoch, and shuffle=True draws from the seed.

A resumed epoch starts from the random state that its checkpoint holds.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--resume", default="", metavar="PATH")
arguments = parser.parse_args()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 8)
    loader = DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), 10, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    start = 0
    if os.path.isfile(arguments.resume):
        saved = torch.load(arguments.resume)
        start = saved["epoch"]
        net.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
    elif arguments.resume:
        print(f"no checkpoint found at {arguments.resume}")

    for epoch in range(start, arguments.epochs):
        for index, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {epoch * 5 + index + 1} loss {loss.item()!r}", flush=True)
        scheduler.step()
        state = {"epoch": epoch + 1, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}, "last.tmp")
        os.replace("last.tmp", "last.pt")
    torch.save(net.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
