"""``Trainer(split_on_oom=True)`` on two processes; out-of-memory errors are injected on one of them, or on both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails: Any = lambda phase, samples: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.layer(x).tanh()
        self.fails("forward", len(x))
        if y.requires_grad:
            y.register_hook(lambda grad: self.fails("backward", len(grad)))
        return y


class Net(LightningModule):
    """Raises in its second block, in a phase, on a rank, wherever more samples than ``fits`` come at once."""

    def __init__(self, phase: str, rank: int | None, fits: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.phase, self.rank, self.fits = phase, rank, fits
        self.sizes: list[int] = []

    def check(self, phase: str, samples: int) -> None:
        here = self.rank is None or self.rank == self.global_rank
        if phase == self.phase and samples > self.fits and here and self.global_step >= 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.blocks[1].fails = self.check
        self.seen += len(batch[0])
        self.sizes.append(len(batch[0]))
        loss = nn.functional.mse_loss(self.head(self.blocks(batch[0])), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return FailingAdam(self, lr=0.01)


class FailingAdam(torch.optim.Adam):
    """Its second step fails once on the module's rank, if that is the phase."""

    def __init__(self, net: Net, lr: float) -> None:
        super().__init__(net.parameters(), lr=lr)
        self.net, self.steps = [net], 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            self.net[0].check("optimizer", 1000)
        return super().step(closure)


def fitted(
    strategy: str, split: bool, accumulate: int = 1, phase: str = "", rank: int | None = None, fits: int = 3
) -> tuple[torch.Tensor, list[int], float, int]:
    """The weights after a fit, the sizes that its steps saw, the loss of the epoch, and the optimizer steps."""
    module = Net(phase, rank, fits)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate, split_on_oom=split,
        gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8))
    shards: list[Any] = [*module.parameters()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in shards]
    weights = torch.cat([each.detach().flatten() for each in (*whole, module.seen)])
    return weights, module.sizes, float(trainer.callback_metrics["loss"]), trainer.global_step


@pytest.fixture(scope="module")
def expected(pool: Any) -> Any:
    found: dict[Any, Any] = {}

    def of(strategy: str, accumulate: int) -> Any:
        if (strategy, accumulate) not in found:
            found[strategy, accumulate] = pool.run(fitted, strategy, False, accumulate, group=False)[0]
        return found[strategy, accumulate]

    return of


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("phase", "rank", "accumulate"),
    [
        ("", None, 1),
        ("forward", 0, 1),
        ("forward", 1, 2),
        ("forward", None, 1),
        ("backward", 0, 2),
        ("backward", 1, 1),
        ("backward", None, 2),
        ("optimizer", 0, 1),
        ("optimizer", 1, 1),
    ],
)
def test_gradients_are_those_of_the_whole_batch(
    pool: Any, expected: Any, strategy: str, phase: str, rank: int | None, accumulate: int
) -> None:
    weights, sizes, loss, steps = expected(strategy, accumulate)
    for found in pool.run(fitted, strategy, True, accumulate, phase, rank, group=False):
        torch.testing.assert_close(found[0], weights, rtol=1e-4, atol=1e-5)
        assert found[2] == pytest.approx(loss, rel=1e-4)
        assert found[3] == steps
        splits = phase in ("forward", "backward")
        assert set(found[1][-4:]) == ({2} if splits else {8})  # the ranks have voted: all of them split
    assert set(sizes) == {8}


def stuck(strategy: str) -> str:
    try:
        fitted(strategy, True, phase="forward", rank=1, fits=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_cannot_go_on_ends_the_fit_on_all(pool: Any, strategy: str) -> None:
    first, second = pool.run(stuck, strategy, group=False)
    assert "Rank 1 has run out of memory with micro-batches of one sample" in first
    assert second == "OutOfMemoryError: CUDA out of memory."
