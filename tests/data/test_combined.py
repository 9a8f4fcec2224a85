"""Several loaders as one: what each mode gives, when loaders are started, drawn from and dropped (trap T38)."""

from __future__ import annotations

import gc
import multiprocessing
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import ConfigurationError

INF = float("inf")
MODES = ["min_size", "max_size_cycle", "max_size", "sequential"]


class Source:
    """Gives ``name0, name1, ...``; writes down when it is started, drawn from and at its end."""

    def __init__(self, name: str, stop: float, events: list[str] | None = None) -> None:
        self.name, self.stop = name, stop
        self.events: list[str] = [] if events is None else events

    def __iter__(self) -> Iterator[str]:
        self.events.append(f"{self.name} start")
        return self._batches()

    def _batches(self) -> Iterator[str]:
        number = 0
        try:
            while number < self.stop:
                self.events.append(f"{self.name}{number}")
                yield f"{self.name}{number}"
                number += 1
            self.events.append(f"{self.name} end")
        except GeneratorExit:
            self.events.append(f"{self.name} dropped")
            raise


class Sized(Source):
    def __len__(self) -> int:
        return int(self.stop)


def batches(combined: CombinedLoader) -> list[Any]:
    return [batch for batch, _, _ in combined]


# ---- what a mode gives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Source, Sized])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [["a0", "b0"], ["a1", "b1"]]),
        ("max_size_cycle", [["a0", "b0"], ["a1", "b1"], ["a0", "b2"], ["a1", "b3"], ["a0", "b4"]]),
        ("max_size", [["a0", "b0"], ["a1", "b1"], [None, "b2"], [None, "b3"], [None, "b4"]]),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_t38_side_by_side(mode: str, expected: list[Any], swapped: bool, kind: type[Source]) -> None:
    loaders = [kind("a", 2), kind("b", 5)]
    combined = CombinedLoader(loaders[::-1] if swapped else loaders, mode)
    expected = [row[::-1] for row in expected] if swapped else expected
    assert list(combined) == [(row, index, 0) for index, row in enumerate(expected)]
    assert list(combined) == [(row, index, 0) for index, row in enumerate(expected)]  # and again


@pytest.mark.parametrize("kind", [Source, Sized])
def test_t38_sequential_counts_each_loaders_batches_from_0(kind: type[Source]) -> None:
    combined = CombinedLoader({"x": kind("a", 2), "y": [kind("b", 0), kind("c", 1)]}, "sequential")
    assert list(combined) == [("a0", 0, 0), ("a1", 1, 0), ("c0", 0, 2)]


def test_the_default_is_the_shortest() -> None:
    combined = CombinedLoader([range(2), range(3)])
    assert combined.mode == "min_size"
    assert len(combined) == 2


Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Held:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("tree", "first"),
    [
        (range(3), 0),
        ([range(3), "ab"], [0, "a"]),
        ((range(3), "ab"), (0, "a")),
        ({"z": range(3), "a": "ab"}, {"z": 0, "a": "a"}),
        (OrderedDict(z=range(3), a="ab"), OrderedDict(z=0, a="a")),
        (Pair(range(3), "ab"), Pair(0, "a")),
        (Held(range(3), "ab"), Held(0, "a")),
        ({"x": [range(3), ("ab", range(5, 9))], "y": Pair("cd", {"z": "ef"})},
         {"x": [0, ("a", 5)], "y": Pair("c", {"z": "e"})}),
        (torch.arange(6.0).reshape(3, 2), torch.tensor([0.0, 1.0])),
    ],
    ids=["bare", "list", "tuple", "dict", "ordered dict", "named tuple", "dataclass", "nested", "tensor"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_t38_a_batch_is_the_tree_with_batches_in_it(tree: Any, first: Any, mode: str) -> None:
    combined = CombinedLoader(tree, mode)
    batch, batch_idx, dataloader_idx = next(iter(combined))
    assert type(batch) is type(first)
    assert torch.equal(batch, first) if isinstance(first, torch.Tensor) else batch == first
    assert list(batch) == list(first) if isinstance(batch, dict) else True  # the order of the keys
    assert (batch_idx, dataloader_idx) == (0, 0)
    assert combined.iterables is tree


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": ["xy", "zw"]}, [{"a": "xy"}, {"a": "zw"}]),
        ({"a": [0, 1]}, [{"a": 0}, {"a": 1}]),
        ([b"xy", 2.5], [b"xy", 2.5]),
        ({"a": range(5), "b": (3, 4)}, [{"a": 0, "b": 3}, {"a": 1, "b": 4}]),
        ([DataLoader([7, 8, 9], None), [[0, 1], ["x"]]], [[7, [0, 1]], [8, ["x"]]]),  # type: ignore[arg-type]
        ([torch.tensor(0), torch.tensor(1)], [torch.tensor(0), torch.tensor(1)]),
    ],
    ids=["texts", "numbers", "bare", "beside a loader", "nested", "tensors of one number"],
)
def test_a_list_of_texts_or_numbers_is_one_loader(tree: Any, expected: list[Any]) -> None:
    combined = CombinedLoader(tree)
    assert [batch for batch, _, _ in combined] == expected
    assert len(combined) == len(expected)
    combined.flattened = [list(loader) for loader in combined.flattened]  # a list in the place of a loader is none less
    assert [batch for batch, _, _ in combined] == expected
    assert combined.sampler is None or len(combined.sampler) == len(tree)


def test_the_trainer_reads_a_list_of_texts_alike(make_trainer: Any, regression: Any) -> None:
    class Reads(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            read.append(batch)
            return super().training_step((torch.ones(2, 4), torch.ones(2, 1)), batch_idx)

    read: list[Any] = []
    tree = {"a": ["xy", "zw"]}
    make_trainer().fit(Reads(), tree)
    make_trainer().fit(Reads(), CombinedLoader(tree))
    assert read == [{"a": "xy"}, {"a": "zw"}] * 2


def test_t38_flattened_is_in_the_trees_order() -> None:
    a, b, c, d = (Source(name, 1) for name in "abcd")
    assert CombinedLoader({"z": a, "a": [b, (c,)], "m": d}).flattened == [a, b, c, d]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", [[], {}, (), {"a": []}])
def test_an_empty_tree_gives_no_batch(tree: Any, mode: str) -> None:
    combined = CombinedLoader(tree, mode)
    assert (len(combined), list(combined), combined.flattened) == (0, [], [])


class Nones:
    def __iter__(self) -> Iterator[None]:
        return iter([None, None])


@pytest.mark.parametrize("mode", MODES)
def test_none_is_a_batch_like_others(mode: str) -> None:
    assert list(CombinedLoader(Nones(), mode)) == [(None, 0, 0), (None, 1, 0)]


@pytest.mark.parametrize("mode", MODES)
def test_loaders_that_are_all_empty_give_no_batch(mode: str) -> None:
    combined = CombinedLoader([Sized("a", 0), Sized("b", 0)], mode)
    assert (len(combined), list(combined)) == (0, [])


@pytest.mark.parametrize("short", [Sized("a", 0), iter(["once"])], ids=["empty", "an iterator"])
def test_t38_a_loader_that_cannot_start_again_is_named(short: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'Loader 1 of CombinedLoader\(mode="max_size_cycle"\) gave no batch'):
        list(CombinedLoader([Sized("b", 3), short], "max_size_cycle"))


@pytest.mark.parametrize(("mode", "near"), [("minsize", "'min_size'"), ("max_cycle", "'max_size_cycle'")])
def test_an_unknown_mode(mode: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no mode '{mode}'. Did you mean {near}") as caught:
        CombinedLoader([range(2)], mode)
    assert "Known: max_size, max_size_cycle, min_size, sequential." in str(caught.value)


@pytest.mark.parametrize("leaf", [None, 3])
def test_a_leaf_that_is_no_loader(leaf: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Leaf 1 of CombinedLoader's tree is {leaf}, a {type(leaf).__name__}"):
        CombinedLoader({"a": range(3), "b": leaf})


# ---- when loaders are started, drawn from and dropped ----------------------------------------------------------------


def trace(mode: str, *sizes: int, kind: type[Source] = Source) -> list[str]:
    events: list[str] = []
    combined = CombinedLoader([kind(name, size, events) for name, size in zip("abc", sizes, strict=False)], mode)
    iterator = iter(combined)
    assert events == []  # nothing is started before the first batch is asked for
    for _ in iterator:
        events.append("-")
    return events


def test_t38_min_size_starts_all_then_draws_in_order() -> None:
    expected = ["a start", "b start", "a0", "b0", "-", "a1", "b1", "-", "a end", "b dropped"]
    assert trace("min_size", 2, 5) == expected


def test_t38_max_size_lets_an_ended_loader_rest() -> None:
    expected = ["a start", "b start", "a0", "b0", "-", "a end", "b1", "-", "b2", "-", "b end"]
    assert trace("max_size", 1, 3) == expected


@pytest.mark.parametrize("kind", [Source, Sized])
def test_t38_max_size_cycle_starts_again_exactly_when_a_loader_has_ended(kind: type[Source]) -> None:
    assert trace("max_size_cycle", 2, 4, kind=kind) == [
        "a start", "b start", "a0", "b0", "-", "a1", "b1", "-",
        "a end", "b2", "a start", "a0", "-", "b3", "a1", "-", "b end", "a dropped",
    ]  # fmt: skip  # a is not started a third time, and not drawn from for a round that will not be


def test_t38_max_size_cycle_ends_where_the_longest_ends_wherever_it_stands() -> None:
    for sizes in [(3, 1, 2), (1, 3, 2), (1, 2, 3), (2, 3, 1)]:
        events = trace("max_size_cycle", *sizes)
        assert events.count("-") == 3
        starts = [events.count(f"{name} start") for name in "abc"]
        assert starts == [-(-3 // size) for size in sizes]


def test_t38_loaders_of_one_length_are_started_once() -> None:
    events = trace("max_size_cycle", 2, 2)
    assert [event for event in events if "start" in event] == ["a start", "b start"]


class Holding:
    """Its iterators hold on to something until they are dropped, not only until they end."""

    def __init__(self) -> None:
        self.alive: WeakSet[Any] = WeakSet()
        self.most = 0

    def __iter__(self) -> Iterator[int]:
        iterator = map(abs, range(2))

        class Iterating:
            def __iter__(self) -> Any:
                return self

            def __next__(self) -> int:
                return next(iterator)

        made = Iterating()
        self.alive.add(made)
        self.most = max(self.most, len(self.alive))
        return made


def test_t38_a_loader_that_starts_again_has_dropped_its_iterator() -> None:
    holding = Holding()
    assert len(list(CombinedLoader([holding, range(7)], "max_size_cycle"))) == 7
    assert (holding.most, len(holding.alive)) == (1, 0)


def test_t38_sequential_has_one_iterator_at_a_time() -> None:
    assert trace("sequential", 1, 2) == ["a start", "a0", "-", "a end", "b start", "b0", "-", "b1", "-", "b end"]


def test_t38_sequential_drops_a_limited_iterator_before_the_next() -> None:
    events: list[str] = []
    combined = CombinedLoader([Source("a", INF, events), Source("b", INF, events)], "sequential")
    combined.limits = 1
    assert list(combined) == [("a0", 0, 0), ("b0", 0, 1)]
    assert events == ["a start", "a0", "a dropped", "b start", "b0", "b dropped"]


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_that_is_given_up_drops_its_iterators(mode: str) -> None:
    events: list[str] = []
    for _ in CombinedLoader([Source("a", INF, events)], mode):
        break
    assert events == ["a start", "a0", "a dropped"]


@pytest.mark.parametrize("mode", MODES)
def test_reset_ends_the_pass_and_the_next_one_starts_anew(mode: str) -> None:
    events: list[str] = []
    combined = CombinedLoader([Source("a", 2, events)], mode)
    iterator = iter(combined)
    first = next(iterator)
    combined.reset()
    assert events[-1] == "a dropped"
    assert list(iterator) == []
    assert next(iter(combined)) == first
    assert events.count("a start") == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_error_drops_the_iterators_although_its_traceback_lives(mode: str) -> None:
    events: list[str] = []

    def broken() -> Iterator[str]:
        yield "b0"
        raise KeyError("broken")

    combined = CombinedLoader([Source("a", 2, events), broken()], mode)
    with pytest.raises(KeyError, match="broken") as caught:
        list(combined)
    assert caught.tb is not None
    assert events[-1] == ("a end" if mode == "sequential" else "a dropped")


def draws(mode: str, seed: int) -> tuple[list[Any], torch.Tensor]:
    short = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, shuffle=True)
    long = DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True)
    torch.manual_seed(seed)
    combined = CombinedLoader([short, long], mode)
    rows = [[None if part is None else part[0].tolist() for part in row] for row in batches(combined)]
    return rows, torch.rand(1)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_t38_random_numbers_are_drawn_alike_in_every_run(mode: str) -> None:
    assert draws(mode, 3) == draws(mode, 3)
    assert draws(mode, 3)[0] != draws(mode, 4)[0]


def test_t38_a_loader_that_starts_again_shuffles_again() -> None:
    rows, _ = draws("max_size_cycle", 0)
    rounds = [rows[i][0] + rows[i + 1][0] for i in (0, 2)]
    assert [sorted(indices) for indices in rounds] == [[0, 1, 2, 3]] * 2
    assert any(draws("max_size_cycle", seed)[0][0][0] != draws("max_size_cycle", seed)[0][2][0] for seed in range(5))


def test_t38_random_numbers_are_those_of_loaders_zipped_by_hand() -> None:
    rows, after = draws("min_size", 1)
    short = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, shuffle=True)
    long = DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True)
    torch.manual_seed(1)
    assert rows == [[a[0].tolist(), b[0].tolist()] for a, b in zip(short, long, strict=False)]
    assert after == torch.rand(1)


# ---- workers ---------------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def workers() -> int:
    gc.collect()
    return len(multiprocessing.active_children())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_t38_workers_end_with_the_pass() -> None:
    before = workers()
    loaders = [DataLoader(Numbers(size), batch_size=2, num_workers=1) for size in (2, 4)]
    cycle = [[batch.tolist() for batch in row] for row in batches(CombinedLoader(loaders, "max_size_cycle"))]
    assert cycle == [[[0, 1], [0, 1]], [[0, 1], [2, 3]]]
    assert workers() == before

    shortest = CombinedLoader(loaders, "min_size")
    for _ in shortest:
        assert workers() == before + 2
    assert workers() == before  # although the longer loader has not ended

    one_by_one = CombinedLoader(loaders, "sequential")
    one_by_one.limits = 1
    alive = [workers() - before for _ in one_by_one]
    assert alive == [1, 1]
    assert workers() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_t38_reset_ends_workers_also_persistent_ones() -> None:
    before = workers()
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=True)
    combined = CombinedLoader([loader], "max_size_cycle")
    assert len(batches(combined)) == 2
    assert workers() == before + 1  # they were asked to stay
    iterator = iter(combined)
    next(iterator)
    assert workers() == before + 1  # and are used again
    combined.reset()
    assert workers() == before


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


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_loader_that_is_its_own_iterator_is_started_once_a_pass(mode: str, limit: int | None) -> None:
    loader = Restarting()
    combined = CombinedLoader([loader], mode)
    combined.limits = limit
    batches = [batch if mode == "sequential" else batch[0] for batch, _, _ in combined]
    assert (batches, loader.starts) == ([101, 102, 103, 104][:limit], 1)
    assert next(iter(iter(loader))) == 301  # the control: a second iter() does start it again
