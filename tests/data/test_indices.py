"""Which samples a batch holds, also while workers fetch ahead; the user's loader stays as it is."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from drivetrain.data.combined import CombinedLoader
from drivetrain.data.feed import feed
from drivetrain.data.indices import RecordedIndices
from drivetrain.errors import ConfigurationError


class Tens(Dataset[int]):
    """Sample i is 10 i. With an event, sample 0 waits for sample 9, so that a later batch is ready before the first."""

    def __init__(self, size: int = 10, overtaken: Any = None) -> None:
        self.size, self.overtaken = size, overtaken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if self.overtaken is not None:
            if index == 0:
                assert self.overtaken.wait(60)
            elif index == 9:
                self.overtaken.set()
        return 10 * int(index)


def check(recorded: RecordedIndices) -> list[list[Any]]:
    """A pass; every index must be that of its sample."""
    seen = []
    for batch in recorded:
        indices = recorded.pop()
        assert [10 * index for index in indices] == torch.as_tensor(batch).reshape(-1).tolist()
        seen.append(indices)
    return seen


def test_in_order() -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_size=4))
    assert len(recorded) == 3
    assert check(recorded) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert check(recorded) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_as_the_loader_itself_would_shuffle(drop_last: bool) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Tens(), batch_size=4, shuffle=True, drop_last=drop_last)

    torch.manual_seed(5)
    plain = [[value // 10 for value in batch.tolist()] for batch in loader()]
    after = torch.rand(1)
    torch.manual_seed(5)
    assert check(RecordedIndices(loader())) == plain
    assert torch.rand(1) == after


class Eager:
    """A batch sampler that draws all its random numbers as soon as it is started."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(8).reshape(4, 2).tolist())

    def __len__(self) -> int:
        return 4


def test_random_numbers_are_drawn_when_the_sampler_itself_draws_them() -> None:
    loader = DataLoader(Tens(8), batch_sampler=Eager())  # type: ignore[arg-type]
    torch.manual_seed(2)
    plain = [[value // 10 for value in batch.tolist()] for batch in loader]
    torch.manual_seed(2)
    assert check(RecordedIndices(loader)) == plain


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_order", [True, False])
def test_with_workers_that_fetch_ahead_and_overtake_each_other(in_order: bool) -> None:
    overtaken = multiprocessing.Event()
    loader = DataLoader(Tens(12, overtaken), batch_size=3, num_workers=2, prefetch_factor=2, in_order=in_order)
    assert check(RecordedIndices(loader)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert loader.in_order is in_order


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_persistent_workers_are_used_again_and_end_with_it() -> None:
    before = len(multiprocessing.active_children())
    loader = DataLoader(Tens(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    recorded = RecordedIndices(loader)
    for batch in recorded:  # given up while indices are drawn ahead
        assert [10 * index for index in recorded.pop()] == batch.tolist()
        break
    ids = {process.pid for process in multiprocessing.active_children()}
    assert sorted(index for indices in check(recorded) for index in indices) == list(range(10))
    assert {process.pid for process in multiprocessing.active_children()} == ids
    assert loader._iterator is None
    del recorded
    gc.collect()
    assert len(multiprocessing.active_children()) == before


def test_a_batch_that_is_fetched_ahead_waits_its_turn() -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_size=4))
    for batch, _ in feed(recorded, float("inf"), None, True):
        assert [10 * index for index in recorded.pop()] == batch.tolist()


def test_a_pass_that_was_given_up_leaves_nothing_behind() -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_size=4))
    given_up = iter(recorded)
    next(given_up), next(given_up)
    assert check(recorded) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_loader_stays_as_it_is() -> None:
    loader = DataLoader(Tens(), batch_size=4, shuffle=True)
    before = dict(vars(loader))
    recorded = RecordedIndices(loader)
    check(recorded)
    assert vars(loader) == before
    assert recorded.loader is loader


class Scaled(DataLoader[Any]):
    def __init__(self, by: int) -> None:
        super().__init__(Tens(), batch_size=4)
        self.by = by

    def __iter__(self) -> Any:
        assert self.batch_sampler is not None
        assert self.batch_sampler.batch_size == 4  # type: ignore[attr-defined]
        return (batch * self.by for batch in super().__iter__())


def test_a_subclass_gives_its_own_batches() -> None:
    recorded = RecordedIndices(Scaled(-1))
    assert [(batch.tolist(), recorded.pop()) for batch in recorded][2] == ([-80, -90], [8, 9])


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() for _ in range(2))


def test_a_subclass_that_gives_more_than_was_drawn_is_refused() -> None:
    recorded = RecordedIndices(Twice(Tens(4), batch_size=4))
    with pytest.raises(ConfigurationError, match="The loader Twice yielded more batches than its sampler drew"):
        list(recorded)


# ---- without batches, and what samplers draw -------------------------------------------------------------------------


def test_without_batch_size_a_sample_is_a_batch() -> None:
    recorded = RecordedIndices(DataLoader(Tens(3), batch_size=None))
    assert check(recorded) == [[0], [1], [2]]
    assert len(recorded) == 3


class Bulk(Dataset[Any]):
    """Takes what a sampler draws as it comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return index


def test_without_batch_size_a_sampler_may_draw_lists() -> None:
    sampler = BatchSampler(RandomSampler(range(4)), 3, drop_last=False)
    recorded = RecordedIndices(DataLoader(Bulk(), batch_size=None, sampler=sampler))
    assert [recorded.pop() == list(batch) for batch in recorded] == [True, True]


def test_without_batch_size_a_tuple_is_one_index() -> None:
    recorded = RecordedIndices(DataLoader(Bulk(), batch_size=None, sampler=[(0, "a"), (1, "b")]))
    for _ in recorded:
        assert recorded.pop() in ([(0, "a")], [(1, "b")])


@pytest.mark.parametrize(
    "draws",
    [
        [(1, 2), (3, 0)],
        [torch.tensor([1, 2]), torch.tensor([3, 0])],
        [[torch.tensor(1), torch.tensor(2)], [torch.tensor(3), torch.tensor(0)]],
        [np.array([1, 2]), np.array([3, 0])],
    ],
    ids=["tuples", "tensors", "lists of tensors", "arrays"],
)
def test_indices_are_plain_lists(draws: Any) -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_sampler=draws))
    found = check(recorded)
    assert found == [[1, 2], [3, 0]]
    assert not any(isinstance(index, torch.Tensor) for indices in found for index in indices)


class Generating:
    """Draws what can be read once."""

    def __iter__(self) -> Iterator[Iterator[int]]:
        return (iter(pair) for pair in [[1, 2], [3, 0]])


def test_indices_that_can_be_read_once_reach_the_dataset_too() -> None:
    assert check(RecordedIndices(DataLoader(Tens(), batch_sampler=Generating()))) == [[1, 2], [3, 0]]  # type: ignore[arg-type]


class Reusing:
    """Draws the same list object each time."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(3):
            batch[:] = [index]
            yield batch


def test_a_list_that_is_used_again_by_its_sampler_is_copied() -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_sampler=Reusing()))  # type: ignore[arg-type]
    list(recorded)
    assert [recorded.pop() for _ in range(3)] == [[0], [1], [2]]


# ---- loaders without indices -----------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        ([1, 2], [1, 2]),
        (DataLoader(Stream(), batch_size=2), [[0, 1], [2, 3]]),
        (CombinedLoader({"a": range(2)}), [{"a": 0}, {"a": 1}]),
        (CombinedLoader([range(1), range(5, 6)], "sequential"), [0, 5]),
    ],
    ids=["list", "stream", "combined", "combined in sequence"],
)
def test_a_loader_without_indices_has_empty_lists(loader: Any, batches: list[Any]) -> None:
    recorded = RecordedIndices(loader)
    seen = []
    for batch in recorded:
        seen.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        assert recorded.pop() == []
    assert seen == batches


def test_an_unknown_length_stays_unknown() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(RecordedIndices(DataLoader(Stream())))
    with pytest.raises(TypeError, match="has no len"):
        len(RecordedIndices(DataLoader(Tens(), batch_sampler=Reusing())))  # type: ignore[arg-type]


def test_asking_more_often_than_there_were_batches() -> None:
    recorded = RecordedIndices(DataLoader(TensorDataset(torch.arange(2))))
    with pytest.raises(ConfigurationError, match="called more often than there were batches"):
        recorded.pop()
    for _ in recorded:
        recorded.pop()
        with pytest.raises(ConfigurationError, match="Call it once per batch"):
            recorded.pop()


def test_its_sampler_can_be_copied() -> None:
    recorded = RecordedIndices(DataLoader(Tens(), batch_size=4))
    assert copy.copy(recorded._source.batch_sampler).batch_size == 4
