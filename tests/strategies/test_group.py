"""The contract of a group: one process, process groups of torch, and one that somebody else has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.errors import ConfigurationError, NotSupportedError, UnknownNameError
from drivetrain.strategies import Group, LoneGroup, SingleDeviceStrategy, TorchGroup
from drivetrain.testing import check_group


class Pretended(Group):
    """A rank of a job that is not there: every other rank gives what ``other`` makes of this one's."""

    def __init__(self, rank: int, ranks: Sequence[int], other: Callable[[Any, int], Any] | None = None) -> None:
        self.rank, self.ranks, self.other = rank, ranks, other
        self.exchanges = 0

    def gather_objects(self, obj: Any) -> list[Any]:
        self.exchanges += 1
        if self.other is None:
            return [obj] * self.size
        return [obj if rank == self.rank else self.other(obj, rank) for rank in self.ranks]

    def new(self, ranks: Sequence[int]) -> Group:
        return Pretended(self.rank, ranks, self.other)


# ---- what every group does -------------------------------------------------------------------------------------------


def check_contract(group: Group) -> None:
    check_group(group)
    with pytest.raises(UnknownNameError):
        group.all_reduce(torch.ones(1), "median")
    for ranks in ([group.rank] * 2, [group.rank, 4711], []):
        with pytest.raises(ConfigurationError, match="this one among them"):
            group.new(ranks)


def test_one_process_is_a_group_without_any_process_group() -> None:
    assert not dist.is_initialized()
    check_contract(LoneGroup())
    check_contract(LoneGroup(3))


class ByObjects(Group):
    """Exchanges objects alone, and has everything else from the contract."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.ranks = group, group.rank, group.ranks

    def gather_objects(self, obj: Any) -> list[Any]:
        return self.group.gather_objects(obj)

    def new(self, ranks: Sequence[int]) -> Group:
        return ByObjects(self.group.new(ranks))


def in_torchs_groups() -> Any:
    world = TorchGroup()
    check_contract(world)
    check_contract(ByObjects(world))
    mine = [0, 2] if world.rank != 1 else [1]
    group = world.new(mine)
    check_contract(group)
    check_contract(TorchGroup(dist.new_group([world.rank], use_local_synchronization=True)))
    x = torch.tensor([2.0 + world.rank], requires_grad=True)
    gathered = group.all_gather(x, sync_grads=True)
    (gathered * torch.arange(1.0, 1 + group.size).unsqueeze(1)).sum().backward()
    return type(group).__name__, list(group.ranks), x.grad


def test_torchs_groups_and_groups_of_some_of_their_ranks(pool: Any) -> None:
    found = pool.run(in_torchs_groups, world_size=3)
    assert [name for name, *_ in found] == ["TorchGroup", "LoneGroup", "TorchGroup"]
    assert [ranks for _, ranks, _ in found] == [[0, 2], [1], [0, 2]]
    assert [gradient.item() for *_, gradient in found] == [2.0, 1.0, 4.0]  # of both members; each backward pass of one


class Reversed(ByObjects):
    """Gathers in the wrong order."""

    def gather_objects(self, obj: Any) -> list[Any]:
        return super().gather_objects(obj)[::-1]


def check_reversed() -> str:
    with pytest.raises(AssertionError) as caught:
        check_group(Reversed(TorchGroup()))
    return str(caught.value)


def test_a_group_that_breaks_the_contract_is_found(pool: Any) -> None:
    """The negative control."""
    message = (
        "gather_objects(obj) is [{'rank': 1}, {'rank': 0}], and the contract of a group says [{'rank': 0}, {'rank'"
    )
    assert all(message in text for text in pool.run(check_reversed))


def in_different_numbers_of_groups() -> str:
    world = TorchGroup()
    if world.rank < 2:
        world.new([0, 1])
    message = "no member"
    if world.rank != 1:
        with pytest.raises(ConfigurationError) as caught:
            world.new([0, 2])
        message = str(caught.value)
    world.barrier()  # rank 0 keeps what the others ask for
    return message


def test_a_group_that_torch_would_wait_for_is_an_error_on_all_its_members(pool: Any) -> None:
    first, _, third = pool.run(in_different_numbers_of_groups, world_size=3)
    assert first == third
    assert "TorchGroup.new([0, 2]): these ranks are in 2, 1 process groups" in first


def differing() -> list[str]:
    group, rank = TorchGroup(), dist.get_rank()
    messages = []
    for call in (
        lambda: group.all_gather(torch.ones(1 + rank)),
        lambda: group.gather_keyed(["a"] if rank else ["b"], torch.ones(1)),
        lambda: group.barrier("a" if rank else "b"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_members_that_differ_all_get_an_error(pool: Any) -> None:
    first, second = pool.run(differing)
    assert first == second
    assert "all_gather(float32 of shape (1,))" in first[0]
    assert "rank 0 has 'b'" in first[1]
    assert "barrier('b')" in first[2]


# ---- a group of somebody else's --------------------------------------------------------------------------------------


def ranked(obj: Any, rank: int) -> Any:
    """What another rank gives where this one gives its rank."""
    kinds: dict[Any, Callable[[], Any]] = {Tensor: lambda: torch.full_like(obj, rank)}
    return kinds[type(obj)]() if type(obj) in kinds else obj


def test_gather_objects_is_all_that_a_group_must_bring() -> None:
    group = Pretended(5, range(3, 9), ranked)
    assert (group.size, group.index) == (6, 2)
    assert group.all_gather(torch.tensor([5, 5])).tolist() == [[rank] * 2 for rank in range(3, 9)]
    mine = torch.tensor(5, dtype=torch.uint8)
    assert group.all_reduce(mine, "sum").item() == sum(range(3, 9))
    assert group.all_reduce(mine, "mean").dtype is torch.float64
    assert group.all_reduce(mine, "product").item() == 3 * 4 * 5 * 6 * 7 * 8
    assert group.all_reduce(torch.tensor(5.0, dtype=torch.bfloat16), "mean").dtype is torch.bfloat16
    with pytest.raises(NotSupportedError, match="does not pass gradients"):
        group.all_gather(torch.ones(1, requires_grad=True), sync_grads=True)


def test_names_that_differ_are_found_in_such_a_group() -> None:
    def other(obj: Any, rank: int) -> Any:
        return (["b"], obj[1]) if rank == 2 else obj

    with pytest.raises(ConfigurationError, match="rank 2 has 'b'"):
        Pretended(0, range(3), other).gather_keyed(["a"], torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"shapes \[\(1,\), \(2,\)\]"):
        Pretended(0, range(2), lambda obj, rank: (obj[0], torch.ones(2))).gather_keyed(["a"], torch.ones(1))


class OneOfMany(SingleDeviceStrategy):
    """This process is rank 517 of 1,024, of which each pair holds one model."""

    facts = SingleDeviceStrategy.facts.but(is_distributed=True)
    global_rank, world_size = 517, 1024

    def make_world(self) -> Group:
        return Pretended(self.global_rank, range(self.world_size))

    def make_data_group(self, world: Group) -> Group:
        return world.new(range(world.rank % 2, world.size, 2))


class Seen(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0].flatten().tolist())
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True)
        return WeightedLoss(self.layer(batch[0]).square().mean(), len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def test_a_strategy_brings_a_group_of_1024_ranks_that_are_not_there() -> None:
    strategy, module = OneOfMany(accelerator=None), Seen()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.arange(4096.0).unsqueeze(1))
    trainer.fit(module, DataLoader(data, batch_size=2))
    begin = 2 * (517 // 2)  # its pair is the 259th of 512, and each takes 2 samples of every global batch of 1,024
    assert module.batches == [[1024.0 * number + begin, 1024.0 * number + begin + 1] for number in range(4)]
    assert trainer.callback_metrics["samples"] == 4096
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 512, "rank": 258}
    assert trainer.predict(module, DataLoader(data, batch_size=2)) == []  # rank 0 returns them
    assert strategy.reduce(torch.ones(()), reduce_op="sum") == 1024
    assert strategy.all_gather(torch.ones(2), group=strategy.data).shape == (512, 2)


@pytest.mark.parametrize("base", [OneOfMany, SingleDeviceStrategy])
def test_a_reduce_of_the_users_makes_one_value_of_what_is_logged(base: Any) -> None:
    asked: list[tuple[float, Any, str]] = []

    class Own(base):  # type: ignore[misc]
        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            asked.append((float(tensor), group, reduce_op))
            return super().reduce(tensor, group, reduce_op) + 1000

    class Logs(Seen):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", float(batch_idx), on_epoch=True, sync_dist=True)
            self.log("own", 7.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("most", float(batch_idx), reduce_fx="max", sync_dist=True)

    strategy = Own(accelerator=None)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=4,
    )  # fmt: skip
    count, group = (512, strategy.data) if base is OneOfMany else (1, None)
    data = TensorDataset(torch.arange(8.0 * count).unsqueeze(1))
    trainer.fit(Logs(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    assert asked == [(3.0, group, "mean"), (3.0, group, "max"), (1.5, group, "mean"), (8.0, group, "sum")]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"mean": 1001.5, "mean_step": 1003, "mean_epoch": 1001.5, "own": 7, "most": 1003,
                       "samples": 1000 + 8 * count}  # fmt: skip


def test_one_process_has_one_group_that_is_both() -> None:
    strategy = SingleDeviceStrategy("cpu")
    assert strategy.world is strategy.data
    assert (strategy.world.rank, list(strategy.world.ranks)) == (0, [0])
    x = torch.ones(2, requires_grad=True)
    assert strategy.all_gather(x) is x
    assert strategy.reduce(x) is x
    assert strategy.reduce("text") == "text"


def test_a_strategy_of_several_ranks_must_bring_a_group() -> None:
    class Without(SingleDeviceStrategy):
        facts, world_size = SingleDeviceStrategy.facts.but(is_distributed=True), 2

    with pytest.raises(ConfigurationError, match=r"has world_size=2.*make_world\(\)"):
        Without("cpu").barrier()


def test_a_rank_is_a_member_of_its_data_group() -> None:
    class Elsewhere(OneOfMany):
        def make_data_group(self, world: Group) -> Group:
            return Pretended(517, range(512))

    with pytest.raises(ConfigurationError, match="on rank 517"):
        Elsewhere("cpu").data.gather_objects(1)
