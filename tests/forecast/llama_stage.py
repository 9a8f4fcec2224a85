"""A stage of a pipeline that trains a Llama, for plans: ``python llama_stage.py SIZE BATCH LENGTH full TP KIND PLACE``.

PLACE is "first" or "last" of 8 stages, or "interleaved": the first rank with 2 of 16 stages. The batch is cut into 8
micro-batches. The first rank holds the activations of all of them before its first backward pass, the last one those of
one. The backward passes of a later stage come before those of an earlier one. Parameters stay gathered, and gradients
complete, until a stage's last micro-batch, as torchtitan's pipelines keep them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from tests.forecast import llama_program as llama
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.strategies import ModelParallelStrategy

STAGES, PARTS = 8, 8
PLACE = sys.argv[7]
IS_LAST, IS_INTERLEAVED = PLACE == "last", PLACE == "interleaved"


class Stage(LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        count = -(-llama.LAYERS // STAGES) // (1 + IS_INTERLEAVED)
        self.layers = nn.ModuleList(llama.Block() for _ in range(count))
        if IS_INTERLEAVED:
            self.later = nn.ModuleList(llama.Block() for _ in range(count))
        if IS_LAST:
            self.norm, self.head = nn.RMSNorm(llama.WIDTH, 1e-5), nn.Linear(llama.WIDTH, llama.WORDS, bias=False)
        else:
            self.words = nn.Embedding(llama.WORDS, llama.WIDTH)
        self.register_buffer(
            "angles", torch.zeros(llama.LENGTH, 1, llama.WIDTH // llama.HEADS // 2, dtype=torch.complex64)
        )

    def keep(self, keeps: bool, within: nn.Module) -> None:
        """Keep parameters gathered, and gradients complete."""
        for each in within.modules():
            if isinstance(each, FSDPModule):
                each.set_reshard_after_forward(False, recurse=False)
                each.set_reshard_after_backward(not keeps, recurse=False)
                each.set_requires_gradient_sync(not keeps, recurse=False)

    def received(self, words: Tensor) -> Tensor:
        """Return what the stage before sends: this rank's part of the sequence."""
        shape = len(words), llama.LENGTH // llama.TENSOR, llama.WIDTH
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    def through(self, stage: Any, words: Tensor) -> Tensor:
        x = self.words(words) if stage is self.layers and not IS_LAST else self.received(words)
        for each in stage:
            x = each(x, self.angles)
        if not IS_LAST:
            return x
        with loss_parallel():
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), words.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.keep(True, self)
        stages = [self.layers, self.later] if IS_INTERLEAVED else [self.layers]
        todo = [(stage, part) for stage in stages for part in batch.chunk(PARTS)]
        ahead = 1 if IS_LAST else PARTS
        waiting: list[tuple[nn.Module, Tensor]] = []
        for stage in reversed(stages):
            for number in range(PARTS):
                while todo and len(waiting) < ahead * len(stages):
                    place, part = todo.pop(0)
                    waiting.append((place, self.through(place, part)))
                at = next(at for at, (place, _) in enumerate(waiting) if place is stage)
                out = waiting.pop(at)[1]
                if number == PARTS - 1:
                    self.keep(False, self if stage is self.layers else stage)
                with loss_parallel():
                    self.manual_backward(out, gradient=torch.empty_like(out))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


if __name__ == "__main__":
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    absent = ("words",) if IS_LAST else ("norm", "head")
    plan = {name: style for name, style in llama.PLAN.items() if name not in absent}
    if IS_INTERLEAVED:
        plan |= {name.replace("layers", "later"): style for name, style in plan.items()}
    strategy = ModelParallelStrategy(
        "auto", llama.TENSOR, tp_plan=plan, mixed_precision=mixed, auto_wrap_policy={llama.Block}
    )
    batch = torch.zeros(2 * llama.BATCH, llama.LENGTH, dtype=torch.long)
    Trainer(accelerator="gpu", strategy=strategy).fit(Stage(), DataLoader(batch, batch_size=llama.BATCH))  # type: ignore[arg-type]
