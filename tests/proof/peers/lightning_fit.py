"""Lightning: ModelCheckpoint each few steps, and fit(ckpt_path="last").

--every epoch saves at the ends of epochs. --shuffle shuffles the training data.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--every", choices=["steps", "epoch"], default="steps")
parser.add_argument("--plain", action="store_true", help="neither shuffling nor dropout")
args = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0 if args.plain else 0.1), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        print(f"step {self.global_step + 1} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(42)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.cos().sum(1, keepdim=True)), 8, shuffle=not args.plain)
saves = {"steps": {"every_n_train_steps": 5}, "epoch": {"every_n_epochs": 1}}[args.every]
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", log_every_n_steps=1, logger=CSVLogger(".", name="logs", version=0),
    callbacks=ModelCheckpoint("checkpoints", save_last=True, **saves), enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
net = Net()
trainer.fit(net, loader, ckpt_path="last")
torch.save(net.state_dict(), "final.pt")
