"""A copy of a loader that draws in another order: what is kept, what is refused (traps T2 and T35)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from drivetrain.data.resample import with_sampler, without_shuffle
from drivetrain.errors import ConfigurationError

REVERSED = [7, 6, 5, 4, 3, 2, 1, 0]


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def drawn(loader: Any) -> list[Any]:
    return [batch[0].tolist() for batch in loader]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Pairs:
    """A batch sampler of the user's own, over a sampler."""

    def __init__(self, sampler: Any, flip: bool) -> None:
        self.sampler, self.flip = sampler, flip

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for start in range(0, len(indices), 2):
            pair = indices[start : start + 2]
            yield pair[::-1] if self.flip else pair

    def __len__(self) -> int:
        return len(self.sampler) // 2


class Sealed:
    """A batch sampler that nobody can tell what to draw from."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 0], [3, 2]])


class ReadOnly(Sealed):
    @property
    def sampler(self) -> Any:
        return range(8)


class Own(DataLoader[Any]):
    """A subclass that requires an argument, keeps state, and changes what it gives."""

    made = 0

    def __init__(self, where: str, *, scale: int) -> None:
        type(self).made += 1
        super().__init__(data(), batch_size=3, shuffle=True)
        self.where, self.scale = where, scale

    def __iter__(self) -> Any:
        return ([batch[0] * self.scale] for batch in super().__iter__())


# ---- with_sampler (trap T2) ------------------------------------------------------------------------------------------


def test_t2_a_copy_draws_from_the_sampler_and_the_original_does_not() -> None:
    loader = DataLoader(data(), batch_size=3)
    other = with_sampler(loader, REVERSED)
    assert drawn(other) == [[7, 6, 5], [4, 3, 2], [1, 0]]
    assert drawn(loader) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert other.sampler is REVERSED
    assert other.batch_sampler.sampler is REVERSED  # type: ignore[union-attr]
    assert (len(other), len(loader)) == (3, 3)


def test_t2_a_subclass_is_not_constructed_again() -> None:
    loader = Own("here", scale=10)
    loader.later = "set later"  # type: ignore[attr-defined]
    made = Own.made
    other = with_sampler(loader, REVERSED)
    assert Own.made == made
    assert type(other) is Own
    assert (other.where, other.scale, other.later) == ("here", 10, "set later")  # type: ignore[attr-defined]
    assert drawn(other) == [[70, 60, 50], [40, 30, 20], [10, 0]]
    assert isinstance(loader.sampler, RandomSampler)


def collate(samples: list[Any]) -> Any:
    return [torch.stack([sample[0] for sample in samples])]


def init(worker_id: int) -> None: ...


def test_t2_everything_else_is_kept() -> None:
    given: dict[str, Any] = {
        "batch_size": 3, "drop_last": True, "collate_fn": collate, "generator": torch.Generator(), "num_workers": 2,
        "worker_init_fn": init, "prefetch_factor": 5, "persistent_workers": True, "timeout": 9, "in_order": False,
        "multiprocessing_context": "spawn",
    }  # fmt: skip
    loader = DataLoader(data(), **given)
    other = with_sampler(loader, REVERSED)
    for name in given:
        assert getattr(other, name) is getattr(loader, name)
    assert other.dataset is loader.dataset
    assert len(other) == 2
    assert vars(other).keys() == vars(loader).keys()


def test_t2_the_copy_is_still_guarded_as_torch_guards_it() -> None:
    with pytest.raises(ValueError, match="should not be set after"):
        with_sampler(DataLoader(data()), REVERSED).sampler = REVERSED


def test_t2_running_workers_are_not_shared() -> None:
    loader = DataLoader(data(), num_workers=1, persistent_workers=True)
    loader._iterator = running = object()  # type: ignore[assignment]
    assert with_sampler(loader, REVERSED)._iterator is None
    assert loader._iterator is running
    loader._iterator = None


def test_t2_a_batch_sampler_of_the_users_own_is_copied() -> None:
    mine = Pairs(range(8), flip=True)
    loader = DataLoader(data(), batch_sampler=mine)  # type: ignore[arg-type]
    other = with_sampler(loader, REVERSED)
    assert drawn(other) == [[6, 7], [4, 5], [2, 3], [0, 1]]
    assert (mine.sampler, loader.batch_sampler) == (range(8), mine)
    assert isinstance(other.batch_sampler, Pairs)
    assert (len(other), other.batch_size) == (4, None)


@pytest.mark.parametrize("sealed", [Sealed(), ReadOnly(), [[0, 1]]])
def test_t2_a_batch_sampler_that_cannot_be_told_is_refused(sealed: Any) -> None:
    loader = DataLoader(data(), batch_sampler=sealed)
    with pytest.raises(
        ConfigurationError, match=f"The batch sampler {type(sealed).__name__} has no attribute 'sampler'"
    ):
        with_sampler(loader, REVERSED)
    assert loader.batch_sampler is sealed


def test_t2_without_batches() -> None:
    other = with_sampler(DataLoader(data(), batch_size=None), REVERSED)
    assert (drawn(other), len(other), other.batch_sampler) == (REVERSED, 8, None)


def test_t2_without_batches_a_sampler_of_lists_still_gives_lists() -> None:
    loader = DataLoader(data(), batch_size=None, sampler=BatchSampler(RandomSampler(data()), 3, drop_last=True))
    assert drawn(with_sampler(loader, REVERSED)) == [[7, 6, 5], [4, 3, 2]]


# ---- without_shuffle (trap T35) --------------------------------------------------------------------------------------


class Backwards(SequentialSampler):
    """Counts as sequential: it says that it is."""


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        range(3),
        DataLoader(Stream()),
        DataLoader(data(), batch_size=3),
        DataLoader(data(), batch_size=None),
        DataLoader(data(), batch_size=2, sampler=Backwards(data())),
        DataLoader(data(), sampler=[3, 1]),
        DataLoader(data(), batch_sampler=[[3, 1], [0, 2]]),
        DataLoader(data(), batch_sampler=Pairs(SequentialSampler(data()), False)),  # type: ignore[arg-type]
        DataLoader(data(), sampler=DistributedSampler(data(), 2, 0, shuffle=False)),
        DataLoader(data(), batch_size=None, sampler=BatchSampler(SequentialSampler(data()), 2, False)),
    ],
    ids=["list", "range", "stream", "sequential", "no batches", "its subclass", "indices", "batches of indices",
         "batch sampler", "distributed", "bulk"],
)  # fmt: skip
def test_t35_what_is_in_order_comes_back_as_it_is(loader: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        assert without_shuffle(loader) is loader
    assert caught == []


class Wild:
    """No torch sampler at all."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8).tolist())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"shuffle": True}, "RandomSampler"),
        ({"sampler": RandomSampler(data(), replacement=True, num_samples=100)}, "RandomSampler"),
        ({"sampler": WeightedRandomSampler([0.5] * 8, 4)}, "WeightedRandomSampler"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "SubsetRandomSampler"),
        ({"sampler": Wild()}, "Wild"),
        ({"batch_sampler": BatchSampler(RandomSampler(data()), 4, False), "batch_size": 1}, "RandomSampler"),
        ({"batch_sampler": Pairs(RandomSampler(data()), False), "batch_size": 1}, "RandomSampler"),
        ({"shuffle": True, "batch_size": None}, "RandomSampler"),
        ({"sampler": BatchSampler(RandomSampler(data()), 4, False), "batch_size": None}, "RandomSampler"),
    ],
    ids=["shuffle", "replacement", "weighted", "subset", "own", "batch sampler", "own batch sampler", "no batches",
         "bulk"],
)  # fmt: skip
def test_t35_what_is_drawn_at_random_is_drawn_in_order_and_said_once(arguments: dict[str, Any], name: str) -> None:
    loader = DataLoader(data(), **{"batch_size": 4, **arguments})
    before = dict(vars(loader))
    with pytest.warns(UserWarning, match=f"The loader DataLoader draws its samples with a {name}") as caught:
        ordered = without_shuffle(loader)
    assert len(caught) == 1
    assert torch.tensor(drawn(ordered)).flatten().tolist() == list(range(8))
    assert vars(loader) == before
    assert without_shuffle(ordered) is ordered


def test_t35_a_distributed_sampler_keeps_its_shard() -> None:
    sampler = DistributedSampler(data(), num_replicas=2, rank=1, shuffle=True)
    loader = DataLoader(data(), batch_size=2, sampler=sampler)
    with pytest.warns(UserWarning, match="with a DistributedSampler"):
        ordered = without_shuffle(loader)
    assert drawn(ordered) == [[1, 3], [5, 7]]
    assert (sampler.shuffle, loader.sampler) == (True, sampler)


def test_t35_a_subclass_stays_one() -> None:
    with pytest.warns(UserWarning, match="The loader Own draws"):
        ordered = without_shuffle(Own("here", scale=2))
    assert drawn(ordered) == [[0, 2, 4], [6, 8, 10], [12, 14]]


def test_t35_a_batch_sampler_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Let it draw its indices from self.sampler"):
        without_shuffle(DataLoader(data(), batch_sampler=Sealed()))  # type: ignore[arg-type]
