"""Whose part of each batch is whose; what the ranks do with it is in tests/distributed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from drivetrain.data import batched
from drivetrain.data.batched import as_list, drawn_order, draws_each_once
from drivetrain.data.samplers import order_of, samples_in, share, slice_of
from drivetrain.errors import ConfigurationError

DATA = TensorDataset(torch.arange(10))


def alone(obj: Any) -> Any:
    return obj


def batches(loader: Any, world_size: int, **how: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    shares: list[Any] = [share(loader, rank, world_size, alone, **how) for rank in range(world_size)]
    return [[x.tolist() for (x,) in mine] for mine in shares]


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_slices_hold_everything_once_and_differ_by_one_at_most(count: int, world_size: int) -> None:
    slices = [slice_of(count, rank, world_size) for rank in range(world_size)]
    assert [i for begin, end in slices for i in range(begin, end)] == list(range(count))
    sizes = [end - begin for begin, end in slices]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("batch_size", "world_size"), [(2, 2), (3, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_t1_factors_make_the_mean_over_ranks_that_over_the_global_batch(
    batch_size: int, world_size: int, drop_last: bool
) -> None:
    loader: Any = DataLoader(DATA, batch_size, drop_last=drop_last)
    shares: list[Any] = [share(loader, rank, world_size, alone) for rank in range(world_size)]
    sampler = [mine.batch_sampler for mine in shares]
    assert len({len(mine) for mine in shares}) == 1
    size = batch_size * world_size
    for number, parts in enumerate(zip(*([x.tolist() for (x,) in mine] for mine in shares), strict=True)):
        expected = list(range(10))[number * size : (number + 1) * size]
        factors = [one.factor_of(number) for one in sampler]
        mean = sum(f * sum(part) / len(part) for f, part in zip(factors, parts, strict=True)) / world_size
        assert mean == pytest.approx(sum(expected) / len(expected))


def test_t3_padding_begins_the_order_again() -> None:
    assert batches(DataLoader(TensorDataset(torch.arange(5)), 1), 2, pads=True) == [[[0], [2], [4]], [[1], [3], [0]]]


def test_split_batches_share_the_loaders_own() -> None:
    assert batches(DataLoader(DATA, 4), 2, splits=True) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    with pytest.raises(ConfigurationError, match="batch size of 1 cannot be split over 2"):
        share(DataLoader(DATA, 1), 0, 2, alone, splits=True)
    own: Any = DataLoader(DATA, batch_sampler=[[0], [1]])
    with pytest.raises(ConfigurationError, match="split_batches splits batches of a known size"):
        share(own, 0, 2, alone, splits=True)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Groups(BatchSampler):
    """Torch's batch sampler by another name."""


class Grouping(DataLoader[Any]):
    """A loader that groups the samples by its batch size itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Groups(self.sampler, self.batch_size, self.drop_last))


def test_batches_of_a_loaders_own_class_are_sliced_and_those_of_a_users_are_dealt() -> None:
    data = TensorDataset(torch.arange(8))
    assert batches(Grouping(data, 4), 2, splits=True) == batches(DataLoader(data, 4), 2, splits=True)
    order = order_of(Grouping(data, 4))
    assert order is not None
    assert not order["own_batches"]
    users = DataLoader(data, batch_sampler=Groups(range(8), 4, False))
    assert batches(users, 2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


class Endless(BatchSampler):
    def __init__(self) -> None: ...

    def __iter__(self) -> Any:
        return iter([[0]])

    __len__ = property()  # type: ignore[assignment]


def test_t1_what_cannot_be_shared_out_is_left_alone() -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=0)
    for loader in ([1, 2], DataLoader(Stream()), DataLoader(DATA, sampler=sampler)):
        assert share(loader, 0, 2, alone) is None
    once = share(DataLoader(DATA, 2), 0, 2, alone)
    assert share(once, 0, 2, alone) is None
    with pytest.raises(ConfigurationError, match="has no length"):
        share(DataLoader(DATA, batch_sampler=Endless()), 0, 2, alone)


def test_a_rank_draws_the_order_of_rank_zero_and_keeps_its_own_random_state() -> None:
    loader: Any = DataLoader(DATA, 2, sampler=RandomSampler(DATA))
    torch.manual_seed(1)
    said: list[Any] = []

    def say(obj: Any) -> Any:
        said.append(obj)
        return obj

    first = [x.tolist() for (x,) in share(loader, 0, 2, say) or ()]
    torch.manual_seed(2)
    other = share(loader, 1, 2, lambda own: said[0])
    assert other is not None
    second = [x.tolist() for (x,) in other]
    after = torch.rand(1)
    assert {x for parts in (first, second) for batch in parts for x in batch} == set(range(10))
    torch.manual_seed(2)
    torch.empty((), dtype=torch.int64).random_()  # the base seed that every DataLoader draws
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("many", [1, batched.MANY])
def test_the_permutation_is_the_one_that_torchs_sampler_draws(
    count: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process's random state is the same afterwards."""
    monkeypatch.setattr(batched, "MANY", many)
    drawn = drawn_order(RandomSampler(range(count)))
    assert isinstance(drawn, Tensor)
    assert drawn.dtype is (torch.int32 if many == 1 else torch.int64)
    assert draws_each_once(RandomSampler(range(count)))
    found: list[Any] = []
    for draw in (list, lambda sampler: as_list(drawn_order(sampler))):
        torch.manual_seed(count)
        found.append((draw(RandomSampler(range(count))), torch.get_rng_state().tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options", [{"replacement": True}, {"num_samples": 5}, {"num_samples": 15}, {"generator": torch.Generator()}]
)
def test_a_sampler_with_options_draws_its_order_itself(options: dict[str, Any]) -> None:
    sampler = RandomSampler(range(10), **options)
    assert not draws_each_once(sampler) or sampler.generator is not None
    shares: list[Any] = [share(DataLoader(DATA, 2, sampler=sampler), rank, 2, alone) for rank in range(2)]

    def seed() -> None:
        torch.manual_seed(0)
        if sampler.generator is not None:
            sampler.generator.manual_seed(0)

    seed()
    drawn = list(sampler)
    parts = []
    for mine in shares:
        seed()
        parts.append(list(mine.batch_sampler))
    assert [i for pair in zip(*parts, strict=True) for part in pair for i in part][: len(drawn)] == drawn


def draws_per_batch(sampler_of: Any, world_size: int) -> float:
    """How often the order is asked for an index, for each batch of one rank."""
    data = TensorDataset(torch.arange(world_size * 8 * 10))
    mine: Any = share(DataLoader(data, 8, sampler=sampler_of(data)), 1, world_size, alone)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None)
    drawn = list(mine.batch_sampler)
    sys.setprofile(None)
    assert len(drawn) == 10
    return sum(name == torch.utils.data.sampler.__file__ for name in calls) / 10


def test_a_rank_of_1024_does_not_look_at_the_samples_of_the_others() -> None:
    assert draws_per_batch(RandomSampler, 1024) <= 5


def test_an_order_that_is_drawn_sample_by_sample_is_counted() -> None:
    """The negative control."""
    assert draws_per_batch(lambda data: RandomSampler(data, num_samples=len(data) - 1), 1024) > 8000


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("splits", [False, True])
def test_the_position_in_samples_counts_those_of_all_ranks(world_size: int, splits: bool) -> None:
    loader: Any = DataLoader(DATA, batch_size=3)
    shares: list[Any] = [share(loader, rank, world_size, alone, splits) for rank in range(world_size)]
    for shared in shares:
        size = 3 if splits else 3 * world_size
        assert [samples_in(shared, count) for count in range(3)] == [min(count * size, 10) for count in range(3)]
        assert samples_in(shared, len(shared)) == 10
    assert [samples_in(loader, count) for count in range(5)] == [0, 3, 6, 9, 10]


def test_the_position_in_samples_of_other_loaders_is_not_known() -> None:
    for loader in (DataLoader(Stream()), [1, 2]):
        assert samples_in(loader, 1) is None
    assert samples_in(DataLoader(DATA, batch_size=None), 3) == 3


def test_batches_of_a_users_own_are_counted_as_they_are() -> None:
    own: Any = DataLoader(DATA, batch_sampler=[[0, 1], [2], [3]])
    dealt: Any = share(own, 0, 2, alone)
    assert [samples_in(own, count) for count in range(4)] == [0, 1, 2, 3]
    assert [samples_in(dealt, count) for count in range(3)] == [0, 2, 3]
    assert order_of(own) == order_of(dealt)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [3, 4, 7, 20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("done", [1, 5, 6, 9])
def test_what_is_left_of_an_order_is_divided_anew(done: int, world_size: int, size: int, drop_last: bool) -> None:
    """The batches behind ``done`` samples are full but the last one, and those before count as some batches."""
    loader: Any = DataLoader(DATA, batch_size=size, drop_last=drop_last)
    drawn = []
    for rank in range(world_size):
        shared: Any = share(loader, rank, world_size, alone, splits=True)
        batches = shared.batch_sampler
        batches.divided_from = done
        before = batches.batches_before()
        assert samples_in(shared, before) == done
        assert sum(1 for _ in batches.shares()) == len(batches) > before >= 1
        drawn.append([(each.indices, each.factor) for each in batches.shares()][before:])
    left, number = list(range(done, 10)), 0
    for parts in zip(*drawn, strict=True):
        together = [index for indices, factor in parts if factor for index in indices]
        assert together == left[number : number + size]
        assert sum(factor for _, factor in parts) == pytest.approx(world_size)
        number += size
    assert number >= len(left) or (drop_last and len(left) - number < size)


class Restarting:
    """A sampler that is its own iterator and begins again with each ``iter``."""

    starts = 0

    def __iter__(self) -> Restarting:
        self.starts += 1
        self.left = list(range(10))
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampler_that_is_its_own_iterator_is_started_once_a_pass(rank: int) -> None:
    sampler = Restarting()
    shared: Any = share(DataLoader(DATA, 5, sampler=sampler), rank, 2, alone)
    assert [x.tolist() for (x,) in shared] == [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0]][rank:][:1]
    assert sampler.starts == 1
