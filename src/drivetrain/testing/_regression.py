"""The module that the test suite for strategies trains, and a plain loop that computes the expected results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain.base.tree import map_leaves
from drivetrain.callback import Callback
from drivetrain.module.losses import WeightedLoss
from drivetrain.module.module import LightningModule
from drivetrain.strategies.sharded_state import is_dtensor

GLOBAL_BATCH = 8  # samples
BATCHES = 6  # per epoch
QUIET: dict[str, Any] = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip
"""The Trainer's arguments for a run without output and files."""


class Small(LightningModule):
    """A regression with the parameter ``scale``, whose size 3 cannot be divided evenly between two ranks.

    Args:
        kind: "plain", "weighted" (with weighted losses), "manual" (with manual optimization) or "failing" (the second
            step raises an exception).
    """

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.head = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5, 0.25]))
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Any]] = []
        self.inference: set[bool] = set()
        self.called: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x) * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "failing" and self.losses:
            raise ZeroDivisionError
        x, y, tokens = batch
        output = self.head(self.net(x) * self.scale)
        if self.kind == "weighted":
            return weighted(output, y, tokens)
        loss = F.mse_loss(output, y)
        self.losses.append(loss.detach())
        if self.kind != "manual":
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(whole({name: each.grad for name, each in self.named_parameters()}))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inference.add(torch.is_inference_mode_enabled())
        loss = F.mse_loss(self.head(self.net(batch[0]) * self.scale), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch[0]) * self.scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Saves(Callback):
    """Saves a checkpoint after the batch with the number ``at``, counted from 1 over all epochs."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at, self.batches = path, at, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == self.at:
            trainer.save_checkpoint(self.path)


def weighted(output: Tensor, y: Tensor, tokens: Tensor) -> WeightedLoss:
    """Return the mean loss over tokens, with the number of tokens as the loss's weight."""
    each = F.mse_loss(output, y, reduction="none").squeeze(1)
    return WeightedLoss((each * tokens).sum() / tokens.sum(), int(tokens.sum()))


def data(batches: int) -> TensorDataset:
    """Return inputs, targets and token counts of the first ``batches`` global batches."""
    generator, count = torch.Generator().manual_seed(0), BATCHES * GLOBAL_BATCH
    x, y = (torch.randn(count, features, generator=generator) for features in (4, 1))
    tokens = torch.randint(1, 9, (count,), generator=generator)
    return TensorDataset(*(tensor[: batches * GLOBAL_BATCH] for tensor in (x, y, tokens)))


def plain_loop(
    make: Callable[[str], Small],
    accumulate: int = 1,
    clip: tuple[str, float] | None = None,
    epochs: int = 2,
    batches_per_epoch: int = BATCHES,
    kind: str = "plain",
) -> dict[str, Any]:
    """Train the module that ``make`` returns on the host, using only torch."""
    module = make(kind)
    optimizer, dtype = module.configure_optimizers(), module.scale.dtype
    losses: list[Tensor] = []
    gradients: list[dict[str, Any]] = []
    batches = list(zip(*(torch.split(tensor, GLOBAL_BATCH) for tensor in data(batches_per_epoch).tensors), strict=True))
    for _ in range(epochs):
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            tokens = sum(int(batch[2].sum()) for batch in window)
            optimizer.zero_grad()
            for x, y, each in window:
                output, y = module(x.to(dtype)), y.to(dtype)
                loss = F.mse_loss(output, y)
                part: Any = 1 / len(window)
                if kind == "weighted":
                    loss, weight = weighted(output, y, each)
                    part = weight / tokens
                else:
                    losses.append(loss.detach())
                (loss * part).backward()
            gradients.append(whole({name: parameter.grad for name, parameter in module.named_parameters()}))
            _clip_and_step(module, optimizer, clip)
    return {
        **trained(module, optimizer), "losses": torch.stack(losses) if losses else torch.zeros(0),
        "gradients": gradients, "steps": len(gradients),
    }  # fmt: skip


def stepped(module: Small, gradients: list[dict[str, Any]], clip: tuple[str, float] | None) -> dict[str, Any]:
    """For each item of ``gradients``, clip the gradients and make an optimizer step. Return the final weights and
    optimizer state of ``module``.
    """
    optimizer = module.configure_optimizers()
    for each in gradients:
        for name, parameter in module.named_parameters():
            parameter.grad = each[name].to(parameter.dtype)
        _clip_and_step(module, optimizer, clip)
    return trained(module, optimizer)


def _clip_and_step(module: Small, optimizer: Any, clip: tuple[str, float] | None) -> None:
    if clip is not None and clip[0] == "norm":
        nn.utils.clip_grad_norm_(module.parameters(), clip[1])
    elif clip is not None:
        nn.utils.clip_grad_value_(module.parameters(), clip[1])
    optimizer.step()


def trained(module: Small, optimizer: Any) -> dict[str, Any]:
    """Return the weights of ``module`` and the state of its optimizer. Every rank must call this function."""
    weights, states = whole(dict(module.named_parameters())), whole(optimizer.state_dict()["state"])
    return {"weights": weights, "optimizer": states}


def whole(tree: Any) -> Any:
    """Return ``tree`` with copies of all tensors on the host. A DTensor becomes a complete tensor, so every rank must
    call this function.
    """

    def copied(leaf: Any) -> Any:
        if is_dtensor(leaf):
            leaf = leaf.full_tensor()
        return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf

    return {key: map_leaves(copied, value) for key, value in tree.items()}
