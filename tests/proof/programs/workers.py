"""A DataLoader with two workers and a sampler whose position is restored. Noise of a sample is seeded by its number.

--fault worker_state: the noise comes from the workers' own random state, which starts anew with each iterator.
"""

import argparse
import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["worker_state"])
fault = parser.parse_args().fault


class Noisy(Dataset):
    def __init__(self) -> None:
        self.x, self.epoch = torch.randn(72, 8, generator=torch.Generator().manual_seed(1)), 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = None if fault else torch.Generator().manual_seed(self.epoch * 1000 + index)
        return self.x[index] + 0.1 * torch.randn(8, generator=own), self.x[index].sum()


class FromPosition(Sampler):
    epoch = position = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(72, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.position :].tolist())


torch.manual_seed(0)
data, sampler = Noisy(), FromPosition()
loader = DataLoader(data, 6, sampler=sampler, num_workers=2)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
if os.path.exists("checkpoint.pt"):
    net.load_state_dict((saved := torch.load("checkpoint.pt"))["net"])
    sampler.epoch, sampler.position = saved["epoch"], saved["position"]

for epoch in range(sampler.epoch, 3):
    data.epoch = sampler.epoch = epoch
    for step, (x, y) in enumerate(loader, epoch * 12 + sampler.position // 6 + 1):
        loss = nn.functional.mse_loss(net(x).flatten(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 5 == 0:
            state = {"net": net.state_dict(), "epoch": epoch, "position": (step - epoch * 12) * 6}
            torch.save(state, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
    sampler.position = 0
torch.save(net.state_dict(), "final.pt")
