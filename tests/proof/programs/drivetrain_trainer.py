"""drivetrain's Trainer: fit(ckpt_path="last"), with dropout, shuffling, a schedule, a CSV log and a validation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step:
            total = sum(parameter.sum() for parameter in self.parameters())
            print(f"step {self.global_step} loss {total.item()!r}", flush=True)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


seed_everything(0)
x = torch.randn(84, 8)
data = TensorDataset(x, x.cos().sum(1, keepdim=True))
trainer = Trainer(
    max_epochs=5, accelerator="cpu", logger=CSVLogger(".", name="logs", version=0), log_every_n_steps=1,
    callbacks=ModelCheckpoint("checkpoints", every_n_train_steps=4, save_last=True), accumulate_grad_batches=2,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
net = Net()
trainer.fit(net, DataLoader(data, 6, shuffle=True), DataLoader(data, 42), ckpt_path="last")
torch.save(net.state_dict(), "final.pt")
