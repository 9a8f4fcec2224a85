"""A Llama 3.1 as torchtitan trains it, for plans: ``python llama_program.py SIZE BATCH LENGTH CHECKPOINTS TP KIND``.

CHECKPOINTS is "none", "full", or "op": of every block, each second matrix multiplication is computed again, and all
that is no matrix multiplication or attention, as torchtitan's selective checkpointing does. Sharded by FSDP2 with
parameters in bfloat16 and gradients reduced in 32 bits; TP ranks share each layer, its sequence, and the loss. KIND is
"eager", "blocks" if blocks are compiled, or "loss" if the loss is compiled too.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.strategies import FSDPStrategy, ModelParallelStrategy

SIZES = {"8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672), "405B": (126, 16384, 128, 8, 53248)}
SIZE, BATCH, LENGTH, CHECKPOINTS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
TENSOR, KIND = int(sys.argv[5]), sys.argv[6]
LAYERS, WIDTH, HEADS, GROUPS, HIDDEN = SIZES[SIZE]
WORDS = 128_256
aten = torch.ops.aten
KEPT = {
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
}  # fmt: skip


def policy(counts: Counter[Any], context: Any, func: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Keep attention and every second matrix multiplication."""
    if func == aten.mm.default:
        counts[context.is_recompute] += 1
        last = 7  # of a block: the backward pass does not need its result, and a compiler drops it
        keep = counts[context.is_recompute] % 2 and not (KIND != "eager" and counts[context.is_recompute] == last)
    else:
        keep = func in KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(policy, Counter()))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * head, bias=False)

    def forward(self, h: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = h.shape
        q, k, v = (each(h).view(batch, length, -1, WIDTH // HEADS) for each in (self.wq, self.wk, self.wv))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        return self.wo(mixed)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(h)) * self.w3(h))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if CHECKPOINTS == "none":
            return self.computed(x, angles)
        more = {"context_fn": contexts} if CHECKPOINTS == "op" else {}
        return checkpoint(self.computed, x, angles, use_reentrant=False, **more)  # type: ignore[no-any-return]

    def computed(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.ffn(self.norm2(x))  # type: ignore[no-any-return]


class CompiledLoss(torch.autograd.Function):
    """What torch.compile makes of the loss: no copy of the logits in 32 bits, forward or backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("angles", torch.zeros(LENGTH, 1, WIDTH // HEADS // 2, dtype=torch.complex64))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()  # before the forward pass, as torchtitan does

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.words(batch)
        for each in self.layers:
            x = each(x, self.angles)
        logits = self.head(self.norm(x))  # kept until the loss is computed
        if KIND == "loss":
            return CompiledLoss.apply(logits, batch)  # type: ignore[no-any-return, no-untyped-call]
        with loss_parallel() if TENSOR > 1 else nullcontext():
            return F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        with loss_parallel() if TENSOR > 1 else nullcontext():
            loss.backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


PLAN: dict[str, Any] = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm1": SequenceParallel(), "layers.*.norm2": SequenceParallel(), "norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.ffn.w[13]": ColwiseParallel(), "layers.*.ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}  # fmt: skip
"""How torchtitan divides layers and sequences over the ranks of a tensor-parallel group."""


if __name__ == "__main__":
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategy: Any = FSDPStrategy(mixed_precision=mixed, auto_wrap_policy={Block})
    if TENSOR > 1:
        strategy = ModelParallelStrategy("auto", TENSOR, tp_plan=PLAN, mixed_precision=mixed, auto_wrap_policy={Block})
    trainer = Trainer(accelerator="gpu", strategy=strategy, gradient_clip_val=1.0)
    trainer.fit(Llama(), DataLoader(torch.zeros(4 * BATCH, LENGTH, dtype=torch.long), batch_size=BATCH))  # type: ignore[arg-type]
