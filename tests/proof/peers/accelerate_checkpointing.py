"""Accelerate: save_state each few steps, in the middle of epochs, and a resume that skips batches of the same loader.

The shape of its own example of checkpointing: the resumed epoch's batches before the position are drawn and dropped.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--checkpointing_steps", type=int, default=5)
parser.add_argument("--output_dir", default=".")
parser.add_argument("--resume_from_checkpoint", default=None)
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
set_seed(42)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), shuffle=True, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(loader) * 3)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

overall_step = starting_epoch = resume_step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    resume_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
    starting_epoch = resume_step // len(loader)
    resume_step -= starting_epoch * len(loader)
    overall_step = starting_epoch * len(loader)

for epoch in range(starting_epoch, 3):
    model.train()
    for step, (inputs, targets) in enumerate(loader):
        if args.resume_from_checkpoint and epoch == starting_epoch and step < resume_step:
            overall_step += 1
            continue
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        overall_step += 1
        accelerator.print(f"step {overall_step} loss {loss.item()!r}", flush=True)
        if overall_step % args.checkpointing_steps == 0:
            accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
