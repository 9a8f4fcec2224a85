"""An IterableDataset with a shuffle buffer and a state of its own, which checkpoints keep.

--fault stream: it is not restored.
"""

import argparse
import os
import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.random, self.read, self.buffer = random.Random(3), 16, list(range(16))

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            place = self.random.randrange(16)
            number, self.buffer[place], self.read = self.buffer[place], self.read, self.read + 1
            yield torch.linspace(0, 1 + number % 50, 8).sin()

    def state_dict(self) -> dict:
        return {"random": self.random.getstate(), "read": self.read, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict) -> None:
        self.random.setstate(state["random"])
        self.read, self.buffer = state["read"], state["buffer"]


parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["stream"])
fault = parser.parse_args().fault

torch.manual_seed(0)
net, stream = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)), Stream()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
parts = {"net": net, "optimizer": optimizer, "stream": stream}
start = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    start = saved.pop("step")
    for name, state in saved.items():
        if name != fault:
            parts[name].load_state_dict(state)

for step, batch in zip(range(start + 1, 37), DataLoader(stream, 8), strict=False):
    loss = nn.functional.mse_loss(net(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save(net.state_dict(), "final.pt")
