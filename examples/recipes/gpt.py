"""A small GPT in bf16, compiled block by block and sharded over two processes, with its FLOPs utilization. A minute.

It learns the bytes of this program's own libraries, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ThroughputMonitor
from drivetrain.loggers import CSVLogger

BYTES, WIDTH, HEADS, LENGTH, BATCH = 256, 64, 4, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, BYTES)
        self.flops_per_batch = 6 * sum(each.numel() for each in self.parameters()) * BATCH * LENGTH

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [text] = batch  # (B, T + 1) int64
        x = self.tokens(text[:, :-1]) + self.places.weight
        loss = F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(output: str, steps: int, devices: int, backend: str) -> None:
    """Train; the loss of a model that has learned nothing is the logarithm of 256, 5.55."""
    seed_everything(0)
    source = bytearray((inspect.getsource(textwrap) + inspect.getsource(argparse)).encode())
    text = torch.frombuffer(source, dtype=torch.uint8).long()
    data = TensorDataset(text.unfold(0, LENGTH + 1, LENGTH // 2))
    flops = {"length_fn": lambda batch: batch[0].numel(), "available_flops": 1e11}
    trainer = Trainer(
        max_steps=steps, max_epochs=-1, devices=devices, strategy="fsdp" if devices > 1 else "auto",
        precision="bf16-mixed", compile={"blocks": "Block", "backend": backend}, log_every_n_steps=10,
        callbacks=[ThroughputMonitor(lambda batch: len(batch[0]), **flops)], logger=CSVLogger(output, name="gpt"),
    )  # fmt: skip
    trainer.fit(GPT(layers=2), DataLoader(data, BATCH, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"Loss {trainer.logged_metrics['loss']:.2f}; train/device/mfu is in {trainer.log_dir}/metrics.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    main(**vars(parser.parse_args()))
