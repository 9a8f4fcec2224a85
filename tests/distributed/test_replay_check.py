"""Replays with several ranks: equal bits with and without them, and the rank that differs is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.distributed.test_replica_check import Small, data, trainer
from torch import Tensor, nn

from drivetrain.callbacks import ReplayCheck
from drivetrain.callbacks.replay_check import ReplayMismatchError
from drivetrain.loops.replay import ReplayedWindow
from drivetrain.strategies import DDPStrategy, FSDPStrategy, HorovodStrategy
from drivetrain.strategies.sharded_state import local_shard


class Dropping(Small):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.drop(batch[0])], batch_idx)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp", "views": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "fsdp": FSDPStrategy, "horovod": HorovodStrategy,
}  # fmt: skip


def trained(strategy: str, every: int | None, accumulate: int) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    module, replayed = Dropping(), 0
    differences = ReplayedWindow.differences

    def counted(self: ReplayedWindow) -> list[str]:
        nonlocal replayed
        replayed += 1
        return differences(self)

    ReplayedWindow.differences = counted  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*not deterministic")
            loop = trainer(
                2, strategy=STRATEGIES[strategy](), replay_every=every, accumulate_grad_batches=accumulate,
                max_steps=6, gradient_clip_val=0.1,
            )  # fmt: skip
            loop.fit(module, data(2, 7 * accumulate))
    finally:
        ReplayedWindow.differences = differences  # type: ignore[method-assign]
    return replayed, [local_shard(each.detach()).clone() for each in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("ddp", 1), ("ddp", 3), ("views", 1), ("fsdp", 2), ("horovod", 1)]
)
def test_a_run_with_replays_has_the_bits_of_a_run_without(pool: Any, strategy: str, accumulate: int) -> None:
    alone = pool.run(trained, strategy, None, accumulate, group=False)
    replayed = pool.run(trained, strategy, 2, accumulate, group=False)
    for (none, before), (some, after) in zip(alone, replayed, strict=True):
        assert (none, some) == (0, 3)
        assert all(map(torch.equal, before, after))


class OnOneRank(Small):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            self.calls += 1
            loss = loss * self.calls
        return loss


def named() -> str:
    with pytest.raises(ReplayMismatchError) as caught:
        trainer(2, ReplayCheck(2, on_mismatch="stop"), strategy="ddp").fit(OnOneRank(), data(2))
    return str(caught.value)


def test_all_ranks_stop_and_name_the_one_whose_operation_differs(pool: Any) -> None:
    for message in pool.run(named, group=False):
        assert "aten.mul.Tensor in" in message
        assert "loss = loss * self.calls." in message
        assert "on rank 1 the loss of batch 1 and the gradients of" in message
