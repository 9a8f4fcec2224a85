"""Three small programs that plans are compared on: ``python programs.py MODEL [name=value ...]`` trains one of them.

Options: strategy, precision, accumulate, clip, ema, checkpointed, layers, devices, batch_size.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import EMAWeightAveraging
from drivetrain.strategies import FSDPStrategy, ModelParallelStrategy, PipelineStrategy, context_parallel

WIDTH, HEADS, WORDS, LENGTH = 128, 4, 500, 64


class Base(LightningModule):
    checkpointed = False
    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def through(self, blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Block(nn.Module):
    """Attention, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.n1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = context_parallel.attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(Base):
    sequence_dims: ClassVar = {0: 1, 1: 1}

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        places = self.places(context_parallel.positions(x.shape[1]))
        hidden = self.through(self.blocks, self.words(x) + places)
        loss = F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


class MLP(Base):
    """A layer for each of 8 places of a sample, which context parallelism divides."""

    sequence_dims: ClassVar = {0: 1, 1: 1}

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return of_tokens(self.head(self.through(self.blocks, x)), y)

    def configure_pipeline(self, num_stages: int) -> Any:
        layers = [*self.blocks, self.head]
        bounds = [len(layers) * number // num_stages for number in range(num_stages + 1)]
        return [nn.Sequential(*layers[first:last]) for first, last in pairwise(bounds)], of_tokens


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class CNN(Base):
    """Context parallelism divides the rows of an image."""

    sequence_dims: ClassVar = {0: 2}
    tp_plan: ClassVar = {"head": "colwise_rep"}

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Convolution() for _ in range(layers))
        self.head = nn.Linear(32 * 8 * 8, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = F.adaptive_max_pool2d(self.through(self.blocks, self.stem(x)), 8)
        return F.cross_entropy(self.head(hidden.flatten(1)), y)


def data(name: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        words = torch.randint(WORDS, (192, LENGTH), generator=generator)
        return TensorDataset(words, words)
    shape, labels = ((8, 256), (8,)) if name == "mlp" else ((1, 16, 16), ())
    x, y = torch.randn(192, *shape, generator=generator), torch.randint(10, (192, *labels), generator=generator)
    return TensorDataset(x, y)


MODELS = {"gpt": GPT, "mlp": MLP, "cnn": CNN}


def model(name: str, options: dict[str, str]) -> Base:
    made = MODELS[name](**({"layers": int(options["layers"])} if "layers" in options else {}))
    made.checkpointed = "checkpointed" in options
    return made


def strategy(name: str, options: dict[str, str]) -> Any:
    blocks = {Block, Layer, Convolution}
    kinds = {type(each) for each in model(name, options).modules()} & blocks
    if name := options.get("strategy", "auto"):
        if name == "fsdp_window":
            return FSDPStrategy(gradient_exchange="window", auto_wrap_policy=kinds)
        if name in ("1f1b", "gpipe", "interleaved_1f1b"):
            return PipelineStrategy(schedule=name, num_microbatches=4)  # type: ignore[arg-type]  # one of the names
        if name == "hybrid":
            return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
        if name == "shard_grad_op":
            return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
        if name == "tp":
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        if name == "tp_fsdp":
            return ModelParallelStrategy(2, 2, auto_wrap_policy=kinds)
        if name == "cp":
            return ModelParallelStrategy(1, 1, context_parallel_size=2, auto_wrap_policy=kinds)
    return name


def trainer(name: str, options: dict[str, str], **more: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=int(options.get("devices", 1)), strategy=strategy(name, options),
        precision=options.get("precision", "32-true"), accumulate_grad_batches=int(options.get("accumulate", 1)),
        gradient_clip_val=float(options["clip"]) if "clip" in options else None, max_epochs=1, logger=False,
        callbacks=[EMAWeightAveraging(decay=0.9)] if "ema" in options else [], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, optimizer_kernels=None, **more,
    )  # fmt: skip


def loader(name: str, options: dict[str, str]) -> Any:
    return DataLoader(data(name), batch_size=int(options.get("batch_size", 8)))


def parsed(words: list[str]) -> dict[str, str]:
    return dict((word.partition("=")[0], word.partition("=")[2]) for word in words)


if __name__ == "__main__":
    given = parsed(sys.argv[2:])
    trainer(sys.argv[1], given).fit(model(sys.argv[1], given), loader(sys.argv[1], given))
