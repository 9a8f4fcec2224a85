"""Sparse gradients: embeddings by SparseAdam, the rest by SGD; checkpoints are numbered, and the newest is taken."""

import glob
import os

import torch
from torch import nn

torch.manual_seed(0)
users, items = torch.randint(50, (36, 8)), torch.randint(30, (36, 8))
ratings = torch.rand(36, 8)
of_users, of_items, bias = nn.Embedding(50, 4, sparse=True), nn.Embedding(30, 4, sparse=True), nn.Linear(4, 1)
parts = {"users": of_users, "items": of_items, "bias": bias}
parts["sparse"] = torch.optim.SparseAdam([of_users.weight, of_items.weight], lr=0.05)
parts["dense"] = torch.optim.SGD(bias.parameters(), lr=0.1)
os.makedirs("checkpoints", exist_ok=True)
start = 0
if found := sorted(glob.glob("checkpoints/step_*.pt")):
    saved = torch.load(found[-1])
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    start = int(found[-1][-6:-3])

for step in range(start + 1, 37):
    guess = bias(of_users(users[step - 1]) * of_items(items[step - 1])).flatten()
    loss = nn.functional.mse_loss(guess, ratings[step - 1])
    for name in ("sparse", "dense"):
        parts[name].zero_grad()
    loss.backward()
    for name in ("sparse", "dense"):
        parts[name].step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, "checkpoints/new.tmp")
        os.replace("checkpoints/new.tmp", f"checkpoints/step_{step:03}.pt")
torch.save({name: parts[name].state_dict() for name in ("users", "items", "bias")}, "final.pt")
