"""A program that trains a Llama of 3 blocks with FSDP, as ``drivetrain plan`` records it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.strategies import FSDPStrategy

DIM, HEADS, KV_HEADS, HIDDEN, WORDS, LAYERS, LENGTH, HEAD = 4096, 32, 8, 14336, 128_256, 3, 8192, 128


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down, self.first, self.second = nn.Linear(HIDDEN, DIM, bias=False), Norm(), Norm()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.first(x)
        q, k, v = (layer(h).view(batch, length, -1, HEAD) for layer in (self.q, self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        shape = batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD
        k, v = (each[:, :, :, None].expand(shape).reshape(q.shape) for each in (k, v))
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, DIM))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, DIM), Norm()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.words(batch)
        angles = torch.polar(torch.ones(LENGTH, 1, HEAD // 2), torch.ones(LENGTH, 1, HEAD // 2))
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trainer = Trainer(
        max_epochs=1, accelerator="auto", devices=8, strategy=FSDPStrategy(mixed_precision=mixed), logger=False,
        gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Llama(), DataLoader(torch.zeros(16, LENGTH, dtype=torch.long), batch_size=2))
