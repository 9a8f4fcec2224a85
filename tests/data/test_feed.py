"""Batches one by one: how many, how early each is fetched, and who is told the epoch."""

from __future__ import annotations

import pickle
import random
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import islice
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from drivetrain.base.seed import worker_seed_init
from drivetrain.base.tree import move
from drivetrain.data.feed import (
    count_batches,
    feed,
    fetches_ahead,
    make_room_for_sockets,
    seed_workers,
    set_epoch,
)
from drivetrain.data.loader_passes import sized_length
from drivetrain.data.passes import passes_over
from drivetrain.errors import ConfigurationError

INF = float("inf")


class Endless:
    """No length, no end; writes down what was fetched."""

    def __init__(self, events: list[Any] | None = None, stop: float = INF) -> None:
        self.events: list[Any] = [] if events is None else events
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        self.events.append("iter")
        number = 0
        while number < self.stop:
            self.events.append(f"fetch {number}")
            yield number
            number += 1
        self.events.append("end")


class Sized(Endless):
    def __init__(self, length: int, events: list[Any] | None = None) -> None:
        super().__init__(events, length)
        self.length = length

    def __len__(self) -> int:
        return self.length


# ---- how many (trap T34) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "limit", "count"),
    [
        (10, 1.0, 10),
        (10, 1, 1),
        (10, 0.5, 5),
        (10, 0.55, 5),
        (10, 0.1, 1),
        (10, 3, 3),
        (10, 99, 10),
        (10, 0, 0),
        (10, 0.0, 0),
        (3, 0.34, 1),
        (0, 1.0, 0),
        (0, 5, 0),
        (0, 0.5, 0),
        (None, 1.0, INF),
        (None, 1, 1),
        (None, 7, 7),
        (None, 0, 0),
        (None, 0.0, 0),
    ],
)
def test_t34_count_batches(length: int | None, limit: float, count: float) -> None:
    loader = Endless() if length is None else Sized(length)
    assert count_batches(loader, limit, "limit_train_batches") == count
    assert loader.events == []  # counting fetches nothing


def test_t34_a_fraction_of_an_unknown_length() -> None:
    with pytest.raises(ConfigurationError, match="limit_val_batches=0.5 is a fraction, but the loader Endless has no"):
        count_batches(Endless(), 0.5, "limit_val_batches")


@pytest.mark.parametrize("length", [2, 4, 10, 40, 1000])
def test_t34_a_fraction_that_leaves_nothing_names_the_minimum(length: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"limit_test_batches=1e-06 of {length} batches") as caught:
        count_batches(Sized(length), 1e-6, "limit_test_batches")
    check_cure(length, str(caught.value))


@pytest.mark.parametrize("length", [3, 9, 30_000])
def test_t34_the_minimum_that_is_named_is_enough(length: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        count_batches(Sized(length), 1e-6, "limit_test_batches")
    check_cure(length, str(caught.value))


def check_cure(length: int, message: str) -> None:
    found = re.search(r"at least limit_test_batches=([0-9.e-]+),", message)
    assert found is not None
    assert count_batches(Sized(length), float(found[1]), "limit_test_batches") == 1


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(float(samples)))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Promising(Stream):
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("loader", "length", "ahead"),
    [
        (DataLoader(data(), batch_size=2), 4, False),
        (DataLoader(data(), batch_size=3, drop_last=True), 2, False),
        (DataLoader(data(), batch_size=2, num_workers=1), 4, True),
        (DataLoader(Stream(), batch_size=2), None, True),
        (DataLoader(Promising(), batch_size=2), 4, True),
        ([1, 2, 3], 3, False),
        (Sized(5), 5, False),
        (Endless(), None, True),
    ],
    ids=["map", "drop_last", "workers", "stream", "stream with a length", "list", "sized", "endless"],
)
def test_length_and_fetching_ahead(loader: Any, length: int | None, ahead: bool) -> None:
    assert sized_length(loader) == length
    assert fetches_ahead(loader) is ahead


def test_a_length_that_raises_something_else_is_not_hidden() -> None:
    class Broken:
        def __len__(self) -> int:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        sized_length(Broken())


# ---- one by one ------------------------------------------------------------------------------------------------------


def run(batches: Any, num_batches: float, ahead: bool, events: list[Any]) -> list[tuple[Any, bool]]:
    """A pass; what is worked on is written between the fetches."""
    seen = []
    for batch, is_last in feed(batches, num_batches, None, ahead):
        events.append(f"work {batch}")
        seen.append((batch, is_last))
    return seen


def test_with_a_known_length_nothing_is_fetched_early() -> None:
    events: list[Any] = []
    assert run(Sized(3, events), 3, False, events) == [(0, False), (1, False), (2, True)]
    assert events == ["iter", "fetch 0", "work 0", "fetch 1", "work 1", "fetch 2", "work 2", "end"]


def test_t36_with_an_unknown_length_exactly_one_is_fetched_early() -> None:
    events: list[Any] = []
    assert run(Endless(events, stop=3), INF, True, events) == [(0, False), (1, False), (2, True)]
    assert events == ["iter", "fetch 0", "fetch 1", "work 0", "fetch 2", "work 1", "end", "work 2"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_never_more_than_num_batches_are_fetched(num_batches: int, ahead: bool) -> None:
    events: list[Any] = []
    seen = run(Endless(events), num_batches, ahead, events)
    assert seen == [(i, i == num_batches - 1) for i in range(num_batches)]
    assert [event for event in events if str(event).startswith("fetch")] == [f"fetch {i}" for i in range(num_batches)]


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_to_take_is_nothing_fetched(ahead: bool) -> None:
    events: list[Any] = []
    assert run(Endless(events), 0, ahead, events) == []
    assert run([], INF, ahead, []) == []
    assert not [event for event in events if str(event).startswith("fetch")]


def test_a_shorter_pass_than_promised_still_flags_its_last_batch() -> None:
    assert [last for _, last in feed(Endless(stop=2), 5, None, True)] == [False, True]


@pytest.mark.parametrize("ahead", [False, True])
def test_one_batch_is_first_and_last(ahead: bool) -> None:
    assert list(feed([7], 1, None, ahead)) == [(7, True)]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (False, ["fetch 0", "move 0", "work 0", "fetch 1", "move 1", "work 1", "end"]),
        (True, ["fetch 0", "move 0", "fetch 1", "move 1", "work 0", "work 1", "end"]),
    ],
)
def test_a_batch_is_moved_as_soon_as_it_is_fetched(ahead: bool, expected: list[str]) -> None:
    events: list[Any] = []

    def move(batch: int) -> str:
        events.append(f"move {batch}")
        return f"{batch}"

    for batch, _ in feed(Sized(2, events), 2, move, ahead):
        assert isinstance(batch, str)
        events.append(f"work {batch}")
    assert events[1:] == expected


def test_the_iterator_is_made_once_per_pass() -> None:
    source = Sized(2)
    list(feed(source, 2, None, False))
    list(feed(source, 2, None, True))
    assert source.events.count("iter") == 2


# ---- workers (trap T47) ----------------------------------------------------------------------------------------------


def own_init(worker_id: int) -> None: ...


@pytest.mark.parametrize(
    ("wanted", "workers", "given", "expected"),
    [
        ("1", 2, None, worker_seed_init),
        ("1", 2, own_init, own_init),
        ("1", 0, None, None),
        ("0", 2, None, None),
        (None, 2, None, None),
    ],
    ids=["wanted", "the user's own stays", "no workers", "not wanted", "never seeded"],
)
def test_t47_workers_are_seeded_if_that_is_wanted(
    wanted: str | None, workers: int, given: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", wanted or "")
    if wanted is None:
        monkeypatch.delenv("PL_SEED_WORKERS")
    loader = DataLoader(data(), num_workers=workers, worker_init_fn=given)
    seed_workers(loader)
    assert loader.worker_init_fn is expected


def test_workers_of_one_models_ranks_are_seeded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    drawn = []
    for rank, place in [("0", 0), ("1", 0), ("1", 1), ("3", 1)]:
        monkeypatch.setenv("RANK", rank)
        loader = DataLoader(data(), num_workers=1)
        seed_workers(loader, place)
        torch.manual_seed(5)
        pickle.loads(pickle.dumps(loader.worker_init_fn))(0)
        drawn.append((random.random(), torch.rand(())))
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]


def test_t47_what_is_no_dataloader_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    source = Sized(2)
    before = dict(vars(source))
    seed_workers(source)
    assert vars(source) == before


# ---- the epoch (trap T4) ---------------------------------------------------------------------------------------------


class Told:
    """A sampler that writes down which epoch it was told."""

    def __init__(self, inner: Any = None) -> None:
        self.epochs: list[int] = []
        if inner is not None:
            self.sampler = inner

    def __iter__(self) -> Iterator[Any]:
        return iter([])

    def __len__(self) -> int:
        return 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_t4_the_sampler_is_told_once_although_the_batch_sampler_holds_it_too() -> None:
    sampler = Told()
    loader = DataLoader(data(), sampler=sampler, batch_size=2)
    assert loader.batch_sampler.sampler is sampler  # type: ignore[union-attr]
    set_epoch(loader, 3)
    set_epoch(loader, 4)
    assert sampler.epochs == [3, 4]


def test_t4_a_batch_sampler_and_the_sampler_in_it_are_both_told() -> None:
    inner = Told()
    outer = Told(inner)
    set_epoch(DataLoader(data(), batch_sampler=outer), 5)  # type: ignore[arg-type]
    assert (inner.epochs, outer.epochs) == ([5], [5])


def test_t4_a_sampler_nested_in_a_plain_batch_sampler_is_told() -> None:
    inner = Told()
    set_epoch(DataLoader(data(), batch_sampler=BatchSampler(inner, 2, False)), 6)  # type: ignore[arg-type]
    assert inner.epochs == [6]


class ToldStream(Stream):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_t4_an_iterable_style_dataset_is_told() -> None:
    stream = ToldStream()
    set_epoch(DataLoader(stream), 2)
    assert stream.epochs == [2]


@pytest.mark.parametrize(
    "loader",
    [DataLoader(data(), batch_size=2), DataLoader(data(), sampler=RandomSampler(data())), DataLoader(Stream()), [1, 2]],
    ids=["sequential", "random", "stream", "list"],
)
def test_t4_who_takes_no_epoch_is_left_alone(loader: Any) -> None:
    set_epoch(loader, 1)
    assert len(list(loader)) > 0


# ---- steps that fetch their batches themselves -----------------------------------------------------------------------


def test_t37_a_training_step_may_take_the_iterator(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Fetching(regression):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            seen.append((batch_idx, dataloader_idx))
            return self.loss(batch)

    seen: list[Any] = []
    torch.manual_seed(0)
    ours = Fetching()
    make_trainer(max_epochs=2).fit(ours, loader)
    torch.manual_seed(0)
    plain = regression()
    make_trainer(max_epochs=2).fit(plain, loader)

    assert seen == [(0, 0), (1, 0), (2, 0), (3, 0)] * 2
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_t37_a_step_may_take_several_batches_and_the_loop_goes_on_behind_them(
    regression: Any, make_trainer: Any
) -> None:
    class Pairs(regression):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            taken = [next(dataloader_iter), *islice(dataloader_iter, 1)]
            seen.append([batch_idx for _, batch_idx, _ in taken])
            return sum(self.loss(batch) for batch, _, _ in taken)

    seen: list[Any] = []
    trainer = make_trainer()
    batches = DataLoader(TensorDataset(torch.ones(10, 4), torch.ones(10, 1)), batch_size=2)
    trainer.fit(Pairs(), batches)

    assert seen == [[0, 1], [2, 3], [4]]
    assert (trainer.global_step, trainer.progress.total_batches, trainer.is_last_batch) == (3, 5, True)


def test_t37_an_evaluation_step_may_take_the_iterator(validated: Any, loader: Any, make_trainer: Any) -> None:
    class Fetching(validated):  # type: ignore[misc]
        def validation_step(self, dataloader_iter: Any) -> None:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            seen.append((batch_idx, dataloader_idx))
            self.log("val_loss", self.loss(batch))

    seen: list[Any] = []
    torch.manual_seed(0)
    ours = make_trainer().validate(Fetching(), [loader, loader], verbose=False)
    torch.manual_seed(0)
    plain = make_trainer().validate(validated(), loader, verbose=False)

    assert seen == [(i, loader_idx) for loader_idx in range(2) for i in range(4)]
    assert ours[1]["val_loss/dataloader_idx_1"] == plain[0]["val_loss"]


def test_t37_accumulating_unknown_numbers_of_batches_is_an_error(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Fetching(regression):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(ConfigurationError, match="Accumulate inside the step, and write 1"):
        make_trainer(accumulate_grad_batches=2).fit(Fetching(), loader)


# ---- the end of a loader ---------------------------------------------------------------------------------------------


class Ending(Sized):
    """Counts how often it was iterated to its end."""

    ended = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))
        self.ended += 1


def test_a_pass_asks_the_loader_for_its_end() -> None:
    loader = Ending(3)
    given = feed(loader, 3, None, ahead=False)
    assert list(islice(given, 3)) == [(0, False), (1, False), (2, True)]
    assert loader.ended == 0  # not before the last batch has been worked on
    assert next(given, None) is None
    assert loader.ended == 1


def test_a_limit_leaves_the_loader_as_a_break_does() -> None:
    loader = Ending(3)
    assert len(list(feed(loader, 2, None, ahead=False))) == 2
    assert loader.ended == 0


def test_the_order_of_the_next_epoch_is_that_of_a_plain_loop() -> None:
    """torch's RandomSampler draws once more from its generator where it ends."""

    def loader() -> Any:
        return DataLoader(range(10), 4, shuffle=True, generator=torch.Generator().manual_seed(1))

    plain, fed = loader(), loader()
    for _ in range(3):
        assert [b.tolist() for b, _ in feed(fed, 3, None, ahead=False)] == [b.tolist() for b in plain]


def test_an_object_that_is_its_own_iterator_loses_no_batch() -> None:
    class Going:
        """A stream that goes on where the last pass has left it; its length is that of an epoch."""

        def __init__(self) -> None:
            self.count = 0

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Going:
            return self

        def __next__(self) -> int:
            self.count += 1
            return self.count

    stream = Going()
    assert [[batch for batch, _ in feed(stream, 2, None, ahead=False)] for _ in range(2)] == [[1, 2], [3, 4]]


def test_an_iterator_that_is_exhausted_is_answered_with_the_loader_itself() -> None:
    source = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    batches = iter(source)
    list(feed(batches, 3, None, False))
    with pytest.warns(UserWarning, match="and gave 0.* Pass the loader itself instead of its iterator"):
        assert list(feed(batches, 3, None, False)) == []
    with pytest.warns(UserWarning, match=r"left out\. Correct its __len__"):  # of what can be iterated again
        list(feed(source, 4, None, False))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_longer_pass_than_promised_warns(ahead: bool) -> None:
    class Long(Sized):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    with pytest.warns(UserWarning, match="has a length of 3 batches and yields more"):
        assert [batch for batch, _ in feed(Long(3), 3, None, ahead=ahead)] == [0, 1, 2]


def test_validation_begins_after_the_end_of_the_training_loader(validated: Any, make_trainer: Any) -> None:
    events: list[str] = []

    class Pass:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Any]:
            for _ in range(2):
                yield torch.ones(2, 4), torch.ones(2, 1)
            events.append("end")

    class Module(validated):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            events.append("batch")

        def on_validation_start(self) -> None:
            events.append("validation")

    val = DataLoader(TensorDataset(torch.ones(2, 4), torch.ones(2, 1)), 2)
    make_trainer(max_epochs=2, num_sanity_val_steps=0).fit(Module(), Pass(), val)
    assert events == ["batch", "batch", "end", "validation"] * 2


# ---- moving ----------------------------------------------------------------------------------------------------------


class InPlace:
    """A batch that moves itself in place."""

    def __init__(self) -> None:
        self.x = torch.ones(1)

    def to(self, device: Any) -> InPlace:
        self.x = self.x.to(device)
        return self


def test_every_batch_that_moves_in_place_is_moved() -> None:
    """The first one comes back as the same object, which says nothing about where the others lie."""
    batches = [InPlace() for _ in range(3)]
    moved = [batch for batch, _ in feed(batches, 3, partial(move, device=torch.device("meta")), False)]
    assert [batch.x.device.type for batch in moved] == ["meta"] * 3


def test_where_the_first_batch_lies_on_the_device_no_other_is_looked_at() -> None:
    asked: list[Any] = []

    def looked_at(batch: Any) -> Any:
        asked.append(batch)
        return move(batch, torch.device("cpu"))

    assert len(list(feed([[torch.ones(1)]] * 3, 3, looked_at, False))) == 3
    assert len(asked) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_that_fails_when_asked_for_its_end_has_given_all_its_batches(ahead: bool) -> None:
    class Fails:
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            raise ValueError("zip() argument 2 is longer")

    with pytest.warns(UserWarning, match="Fails yielded the 3 batches of its length, and raised ValueError: zip"):
        assert list(feed(Fails(3), 3, None, ahead)) == [(0, False), (1, False), (2, True)]
    with pytest.raises(ValueError, match="zip"):  # before its end it is an error
        list(feed(Fails(4), 4, None, ahead))


class Restarting:
    """A loader that is its own iterator and begins again with each ``iter``, in another order each time."""

    def __init__(self, count: int = 4) -> None:
        self.count = count
        self.starts = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Restarting:
        self.starts += 1
        self.done = 0
        return self

    def __next__(self) -> int:
        if self.done == self.count:
            raise StopIteration
        self.done += 1
        return 100 * self.starts + self.done


@pytest.mark.parametrize("over", ["the loader", "its passes"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_batches", [4, 3, INF])
def test_a_loader_that_is_its_own_iterator_is_started_once_a_pass(over: str, ahead: bool, num_batches: float) -> None:
    loader = Restarting()
    source: Any = loader if over == "the loader" else passes_over(loader)
    for start in (100, 200):
        expected = [start + number for number in range(1, 1 + min(4, int(min(num_batches, 4))))]
        assert [batch for batch, _ in feed(source, num_batches, None, ahead)] == expected
    assert loader.starts == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_with_a_state_reaches_its_end_even_if_its_dataset_is_an_iterator(ahead: bool) -> None:
    class Loader:
        def __init__(self) -> None:
            self.dataset, self.ended = Restarting(), 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            yield from self.dataset
            self.ended += 1

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    loader = Loader()
    assert len(list(feed(loader, 4, None, ahead))) == 4
    assert loader.ended == 1


def test_an_iterator_without_iter_can_be_fed() -> None:
    class Batches:
        def __next__(self) -> int:
            raise StopIteration

    class Loader:
        def __iter__(self) -> Any:
            return Batches()

    assert list(feed(Loader(), INF, None, False)) == []


@pytest.mark.skipif(sys.platform == "win32", reason="sockets with paths")
@pytest.mark.parametrize("length", [60, 120])
def test_workers_send_tensors_where_the_path_of_the_temporary_folder_is_too_long_for_sockets(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as above:
        long = Path(above, "x" * (length - len(above) - 1))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        known: dict[str, Any] = vars(current_process())["_config"]
        config = {name: value for name, value in known.items() if name != "tempdir"}
        monkeypatch.setattr(current_process(), "_config", config)
        loader = DataLoader(torch.arange(4), num_workers=1, timeout=60)  # type: ignore[arg-type]
        make_room_for_sockets(loader)
        chosen = config.get("tempdir")
        assert (chosen is None) == (length == 60)  # where it is short enough, nothing changes
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        if chosen is not None:
            shutil.rmtree(chosen)


def test_the_first_batch_is_not_kept_while_the_others_are_processed() -> None:
    """Of a loader whose batches are on the device already, which is seen from the first one."""
    batches = feed((torch.ones(2) for _ in range(4)), 4, partial(move, device=torch.device("cpu")), ahead=False)
    first = weakref.ref(next(batches)[0])
    assert first() is not None
    next(batches)
    assert first() is None
