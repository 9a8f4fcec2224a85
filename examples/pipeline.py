"""Pipeline parallelism: a residual network in stages, of which each process holds one.

python -m torch.distributed.run --nproc-per-node=2 examples/pipeline.py
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.strategies import PipelineStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Residual(LightningModule):
    """Learns the sum of sines of its inputs."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        blocks = [Block(width) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_pipeline(self, num_stages: int):
        """Return the stages in order, made of the layers of this module, and the loss function."""
        bounds = [len(self.net) * number // num_stages for number in range(num_stages + 1)]
        return [self.net[first:last] for first, last in itertools.pairwise(bounds)], F.mse_loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Of one process without a pipeline; a pipeline calls the stages and the loss function instead."""
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)  # self(x) passes x through all stages

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(processes: int = 2, epochs: int = 5) -> float:
    seed_everything(0)
    x = torch.randn(2560, 8)
    y = x.sin().sum(1, keepdim=True)
    train, val = TensorDataset(x[:2048], y[:2048]), TensorDataset(x[2048:], y[2048:])
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=4) if processes > 1 else "auto"
    trainer = Trainer(accelerator="cpu", devices=processes, strategy=strategy, max_epochs=epochs, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    trainer.fit(Residual(), DataLoader(train, 64, shuffle=True), DataLoader(val, 64))
    trainer.print(f"mean squared error on new inputs: {trainer.callback_metrics['val_loss']:.4f}")
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    main()
