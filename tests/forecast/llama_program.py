"""A Llama 3.1 as torchtitan trains it, for plans: ``python llama_program.py SIZE BATCH LENGTH CHECKPOINTS``.

CHECKPOINTS is "none", "full", or "op": of every block, each second matrix multiplication is computed again, and all
that is no matrix multiplication or attention, as torchtitan's selective checkpointing does. Sharded by FSDP2 with
parameters in bfloat16 and gradients reduced in 32 bits.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.strategies import FSDPStrategy

SIZES = {"8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672), "405B": (126, 16384, 128, 8, 53248)}
SIZE, BATCH, LENGTH, CHECKPOINTS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
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
        keep = counts[context.is_recompute] % 2
    else:
        keep = func in KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(policy, Counter()))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * head, bias=False)
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if CHECKPOINTS == "none":
            return self.computed(x, angles)
        more = {"context_fn": contexts} if CHECKPOINTS == "op" else {}
        return checkpoint(self.computed, x, angles, use_reentrant=False, **more)  # type: ignore[no-any-return]

    def computed(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (each(h).view(batch, length, -1, WIDTH // HEADS) for each in (self.wq, self.wk, self.wv))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.wo(mixed)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("angles", torch.zeros(LENGTH, 1, WIDTH // HEADS // 2, dtype=torch.complex64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.words(batch)
        for each in self.layers:
            x = each(x, self.angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


if __name__ == "__main__":
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategy = FSDPStrategy(mixed_precision=mixed, auto_wrap_policy={Block})
    trainer = Trainer(accelerator="gpu", strategy=strategy, gradient_clip_val=1.0)
    trainer.fit(Llama(), DataLoader(torch.zeros(4 * BATCH, LENGTH, dtype=torch.long), batch_size=BATCH))  # type: ignore[arg-type]
