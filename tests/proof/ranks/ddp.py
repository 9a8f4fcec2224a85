"""DistributedDataParallel with dropout: rank 0 saves, with the random states of all ranks.

--fault rank_random: each rank restores the random state of rank 0.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["rank_random"])
fault = parser.parse_args().fault

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, x.cos().sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, 4, sampler=sampler)
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
torch.manual_seed(rank)
done = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

for epoch in range(done // 12, 3):
    sampler.set_epoch(epoch)
    for step, (inputs, targets) in enumerate(loader, epoch * 12 + 1):
        if step <= done:
            if step == done:
                torch.set_rng_state(saved["random"][0 if fault else rank])
            continue
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 5 == 0:
            states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
            dist.all_gather(states, torch.get_rng_state())
            if rank == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": states}
                torch.save({**state, "step": step}, "checkpoint.tmp")
                os.replace("checkpoint.tmp", "checkpoint.pt")
if rank == 0:
    torch.save(net.module.state_dict(), "final.pt")
dist.destroy_process_group()
