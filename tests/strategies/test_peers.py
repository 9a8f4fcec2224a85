"""Which collectives on tensors the ranks compare before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import TorchGroup
from drivetrain.strategies.peers import Checks

FIRST = 100


def is_checked(gather: Callable[[torch.Tensor], Any]) -> bool:
    """Whether ranks that gather tensors of two types, of as many bytes, get an error. Every rank must call it."""
    dtype = torch.float32 if dist.get_rank() == 0 else torch.int32
    try:
        gather(torch.ones(2, dtype=dtype))
    except ConfigurationError:
        return True
    return False


def counted(check: bool | None) -> dict[str, Any]:
    """What is checked after so many calls in one group, in another one, and in a new run."""
    checks = Checks(check)
    world = TorchGroup(checks=checks)
    part = world.new([0, 1]) if world.rank < 2 else None
    x, found = torch.ones(1), {}
    for _ in range(FIRST - 1):
        world.all_gather(x)
    found["before the last"] = is_checked(world.all_gather) if check is not None else None
    world.all_reduce(x)
    found["all_gather"] = is_checked(world.all_gather)
    if check is None:
        assert not found["all_gather"]
        found["the same group by another name"] = is_checked(TorchGroup(dist.group.WORLD, checks=checks).all_gather)
    found["all_reduce"] = is_checked(world.all_reduce)
    found["another group"] = None if part is None else is_checked(part.all_gather)
    with pytest.raises(ConfigurationError):
        world.barrier(str(world.rank))
    found["after an error"] = is_checked(world.all_gather)
    for _ in range(FIRST):
        world.all_reduce(x)
    found["later"] = is_checked(world.all_gather)
    for wrong in (
        lambda: world.gather_keyed([str(world.rank)], x),
        lambda: world.reduce_boolean_decision(True, all=world.rank == 0),
        lambda: world.broadcast("x", src=world.rank),
    ):
        with pytest.raises(ConfigurationError):  # those are always checked
            wrong()
    checks.start_run(check)
    found["in the next run"] = is_checked(world.all_gather)
    return found


def test_the_first_calls_of_a_run_are_checked_in_each_group(pool: Any) -> None:
    for rank, found in enumerate(pool.run(counted, None, world_size=3)):
        assert found == {
            "before the last": None, "all_gather": False, "the same group by another name": False, "all_reduce": False,
            "another group": True if rank < 2 else None, "after an error": True, "later": False,
            "in the next run": True,
        }  # fmt: skip


@pytest.mark.parametrize("check", [True, False])
def test_all_calls_are_checked_or_none(pool: Any, check: bool) -> None:
    for rank, found in enumerate(pool.run(counted, check, world_size=3)):
        another = found.pop("another group")
        assert another == (check if rank < 2 else None)
        assert set(found.values()) == {check}


def unsendable() -> str:
    world = TorchGroup(checks=Checks(False))
    with pytest.raises(ConfigurationError) as caught:
        world.all_gather(torch.ones(1).to_sparse())
    return str(caught.value)


def test_an_unchecked_call_that_cannot_be_made_is_an_error_on_its_rank(pool: Any) -> None:
    for rank, message in enumerate(pool.run(unsendable)):
        assert f"on rank {rank}" in message
        assert "no dense block of numbers" in message


# ---- as arguments ----------------------------------------------------------------------------------------------------


class Asking(LightningModule):
    """Finds out whether its collectives are checked: when training begins, and after a hundred of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.checked: list[bool] = []

    def on_train_start(self) -> None:
        self.checked.append(is_checked(self.all_gather))
        for _ in range(FIRST):
            self.all_gather(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.checked.append(is_checked(self.all_gather))
        self.checked.append(is_checked(lambda tensor: self.all_gather(tensor, group=dist.group.WORLD)))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def asked(given: dict[str, Any]) -> Any:
    module = Asking()
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    for epochs in (1, 2):
        trainer.limits.max_epochs = epochs
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(2, 1))))
    return module.checked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [True, False, False]),
        ({"check_collectives": True}, [True, True, True]),
        ({"check_collectives": False}, [False, False, False]),
    ],
)
def test_check_collectives_says_what_is_checked_in_each_run(
    pool: Any, given: dict[str, Any], expected: list[bool]
) -> None:
    assert pool.run(asked, given, group=False) == [2 * expected] * 2


def engine_asked(check: bool | None) -> list[bool]:
    engine = Engine(accelerator="cpu", devices=2, strategy="ddp", check_collectives=check)
    engine.launch()
    return [is_checked(engine.all_gather), is_checked(engine.all_reduce)]


@pytest.mark.parametrize("check", [None, False])
def test_an_engine_takes_the_same_argument(pool: Any, check: bool | None) -> None:
    assert pool.run(engine_asked, check, group=False) == [[check is None] * 2] * 2
