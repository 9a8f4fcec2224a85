"""Transformers' Trainer, which finds its last checkpoint as its example scripts do.

--save_strategy epoch saves at the ends of epochs, where a resume needs no position in the data.
"""

import argparse
import os

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--save_strategy", default="steps")
parser.add_argument("--noisy", action="store_true", help="the samples have random noise")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(-1, 1 + index / 10, 8)
        return {"x": x + 0.1 * torch.randn(8) if args.noisy else x, "labels": x.cos().sum().reshape(1)}


class Shown(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **others) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


set_seed(42)
arguments = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=8, save_strategy=args.save_strategy, save_steps=5,
    logging_steps=1, learning_rate=2e-3, report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
net = Net()
trainer = Trainer(net, arguments, train_dataset=Samples(), callbacks=[Shown()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
torch.save(net.state_dict(), "final.pt")
