"""A loop of one's own on drivetrain's Engine, with dropout and a scaler; a checkpoint after each epoch."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine

engine = Engine(accelerator="cpu", precision="bf16-mixed")
engine.launch()
engine.seed_everything(0)
x = torch.randn(48, 8)
loader = engine.setup_dataloaders(DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), 8, shuffle=True))
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
net, optimizer = engine.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
state = {
    "net": net, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "precision": engine.precision,
    "rng": engine.rng, "epoch": 0,
}  # fmt: skip
if os.path.exists("run.ckpt"):
    engine.load("run.ckpt", state)

while state["epoch"] < 6:
    for index, (inputs, targets) in enumerate(loader, state["epoch"] * 6 + 1):
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        engine.backward(loss)
        engine.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        print(f"step {index} loss {loss.item()!r}", flush=True)
    scheduler.step()
    state["epoch"] += 1
    engine.save("run.ckpt", state)
torch.save(net.state_dict(), "final.pt")
