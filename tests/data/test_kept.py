"""What a loader keeps from pass to pass: saved, checked and restored."""

from __future__ import annotations

import argparse
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from drivetrain.base.restoring import WrongForm, expect
from drivetrain.base.seed import isolate_rng, rng_state
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.kept import (
    LOADER_STATES,
    check_worker_state,
    generators_kept,
    generators_of,
    loader_states,
    objects_kept,
    parts_of,
    set_loader_states,
    set_worker_state,
    worker_state,
    workers_kept,
)
from drivetrain.errors import CheckpointError


def shuffled(seed: int = 1, **arguments: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(list(range(6)), shuffle=True, generator=generator, **arguments)  # type: ignore[arg-type]


def order(loader: Any) -> list[int]:
    return [int(batch) for batch in loader]


def test_generators_are_those_of_the_loader_and_of_its_samplers_each_once() -> None:
    first, second, third = (torch.Generator() for _ in range(3))
    data = list(range(4))
    sampler = RandomSampler(data, generator=first)
    batches = BatchSampler(sampler, 2, drop_last=False)
    batches.generator = second  # type: ignore[attr-defined]
    assert generators_of(DataLoader(data, batch_sampler=batches, generator=third)) == [third, second, first]  # type: ignore[arg-type]
    assert generators_of(DataLoader(data, shuffle=True, generator=first)) == [first]  # type: ignore[arg-type]
    assert generators_of(data) == []


def test_the_parts_of_a_combined_loader_are_its_loaders() -> None:
    one, two = shuffled(), shuffled()
    assert parts_of(CombinedLoader([one, {"a": two}])) == [one, two]
    assert parts_of(one) == [one]


def test_generators_are_as_before_after_a_block_that_draws_also_if_it_fails() -> None:
    loader = shuffled()
    expected = order(shuffled())

    def draw_and_fail() -> None:
        with generators_kept([CombinedLoader([loader])]):
            assert order(loader) == expected
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert order(loader) == expected
    assert order(loader) != expected  # the control: without the block the generator moves on


def test_workers_that_persist_outlive_a_block_that_uses_the_loader() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    assert order(loader) == [1, 2]
    workers = loader._iterator
    with workers_kept([loader]):
        assert loader._iterator is None
    assert loader._iterator is workers is not None


def test_fresh_loaders_go_on_with_the_generators_of_those_before() -> None:
    before, plain = shuffled(), DataLoader([1, 2])  # type: ignore[arg-type]
    order(before)
    states = loader_states([CombinedLoader([before, plain]), plain])
    expected = order(before)
    fresh = shuffled(seed=9)
    set_loader_states([CombinedLoader([fresh, plain]), plain], states)
    assert order(fresh) == expected
    assert states[1] == {"generators": [], "workers": [False]}


def test_workers_that_were_alive_are_started_and_no_global_generator_moves() -> None:
    loaders = [DataLoader([1], num_workers=1, persistent_workers=True) for _ in range(2)]  # type: ignore[arg-type]
    states = [{"generators": [], "workers": [True]}, {"generators": [], "workers": [False]}]
    before = rng_state()["torch"]
    set_loader_states(loaders, states)
    assert [loader._iterator is not None for loader in loaders] == [True, False]
    assert torch.equal(rng_state()["torch"], before)


def test_states_of_more_or_fewer_loaders_are_left_out() -> None:
    loader = shuffled()
    states = loader_states([loader, loader])
    set_loader_states([loader], states)
    set_loader_states([loader, [1]], states[:1])


def test_a_generator_that_refuses_its_state_is_explained() -> None:
    with pytest.raises(CheckpointError, match="the validation loaders could not be restored: RuntimeError"):
        set_loader_states([shuffled()], [{"generators": [torch.zeros(3, dtype=torch.uint8)], "workers": [False]}])


def test_what_is_saved_passes_the_check() -> None:
    expect(loader_states([shuffled(), CombinedLoader([shuffled(), shuffled()]), [1]]), LOADER_STATES)
    expect([], LOADER_STATES)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (True, "it is True, and list or tuple is expected"),
        ({"generators": []}, "it is .*list or tuple is expected"),
        ([3], r"\[0\] is 3, and Mapping is expected"),
        ([{"workers": [False]}], r"\[0\]\['generators'\] is missing"),
        ([{"generators": 3, "workers": []}], r"\[0\]\['generators'\] is 3"),
        ([{"generators": [3], "workers": []}], r"\[0\]\['generators'\]\[0\] is 3, and Tensor is expected"),
        ([{"generators": [torch.ones(3)], "workers": []}], r"\['generators'\]\[0\] is not the state of a generator"),
        ([{"generators": []}], r"\[0\]\['workers'\] is missing"),
        ([{"generators": [], "workers": None}], r"\[0\]\['workers'\] is None"),
        ([{"generators": [], "workers": [torch.ones(3)]}], r"\[0\]\['workers'\]\[0\] is tensor.*bool is expected"),
    ],
)
def test_another_form_is_refused_with_its_place(states: Any, message: str) -> None:
    with pytest.raises(WrongForm, match=message):
        expect(states, LOADER_STATES)


# ---- the random state of a worker ------------------------------------------------------------------------------------


def test_a_workers_random_state_is_restored() -> None:
    def draws() -> list[float]:
        return [random.random(), float(torch.rand(())), float(numpy.random.rand())]

    with isolate_rng():
        state = worker_state()
        check_worker_state(state, "")
        expected = draws()
        assert draws() != expected
        set_worker_state(state)
        assert draws() == expected


def test_a_state_without_numpy_leaves_numpys_generator() -> None:
    with isolate_rng():
        python, words, _ = worker_state()
        check_worker_state((python, words, None), "")
        before = numpy.random.get_state()[1].tolist()  # type: ignore[union-attr]
        set_worker_state((python, words, None))
        assert numpy.random.get_state()[1].tolist() == before  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda python, words, numbers: 3, "w is 3, and list or tuple is expected"),
        (lambda python, words, numbers: (python, words), "w has 2 items, and 3 are expected"),
        (lambda python, words, numbers: ((3, (1,), None), words, numbers), r"w\['python'\] is not the state of a gen"),
        (lambda python, words, numbers: (python, "x", numbers), r"w\[1\] is 'x', and bytes is expected"),
        (lambda python, words, numbers: (python, b"", numbers), r"w\[1\] is empty"),
        (lambda python, words, numbers: (python, b"abc", numbers), r"w\['torch'\] is not the state of a generator"),
        (lambda python, words, numbers: (python, words, 7), r"w\[2\] is 7"),
        (lambda python, words, numbers: (python, words, numbers[:2]), r"w\[2\] has 2 items, and 5 are expected"),
        (lambda python, words, numbers: (python, words, ("MT19937", "x", 1, 0, 0.0)), r"w\[2\]\[1\] is 'x'"),
        (lambda python, words, numbers: (python, words, ("MT19937", b"abc", 1, 0, 0.0)), r"w\[2\]\[1\] has 3 bytes"),
        (lambda python, words, numbers: (python, words, ("MT", *numbers[1:])), r"w\['numpy'\] is not the state"),
    ],
)
def test_another_state_of_a_worker_is_refused_with_its_place(damage: Callable[..., Any], message: str) -> None:
    with pytest.raises(WrongForm, match=message):
        check_worker_state(damage(*worker_state()), "w")


class Slotted:
    __slots__ = ("items", "number")

    def __init__(self) -> None:
        self.items, self.number = [1], 1

    def __repr__(self) -> str:
        return f"{self.items} {self.number}"


class Named(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.title = "first"

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("a subclass may do something else here")

    def change(self) -> None:
        self.update(x=3)
        self.title = "second"


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (defaultdict(list, x=[1]), lambda value: (value["x"].append(2), value["y"].append(3))),
        (Counter("aab"), lambda value: value.update("bc")),
        (OrderedDict(x=1, y=2), lambda value: value.move_to_end("x")),
        (SimpleNamespace(n=1, deep=[1]), lambda value: (vars(value).update(n=2), value.deep.append(2))),
        (argparse.Namespace(n=1), lambda value: vars(value).update(n=2)),
        (Named(x=1), Named.change),
        (Slotted(), lambda value: (value.items.append(2), setattr(value, "number", 2))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_and_objects_are_restored_in_place(value: Any, change: Callable[..., Any]) -> None:
    def shown() -> str:
        return f"{value!r} {getattr(value, '__dict__', None)}"

    before = shown()
    with objects_kept([{"value": value}]):
        change(value)
        assert shown() != before
    assert shown() == before


class Cached:
    """Takes its items from an iterator once, and keeps them for later passes."""

    def __init__(self, source: Any) -> None:
        self.source, self.items = source, list[int]()

    def __iter__(self) -> Any:
        yield from self.items
        for item in self.source:
            self.items.append(item)
            yield item


@pytest.mark.parametrize(
    "source", [(n for n in range(3)), iter([0, 1, 2]), map(int, "012")], ids=["generator", "list", "map"]
)
def test_items_that_were_taken_from_an_iterator_are_not_lost(source: Any) -> None:
    loader = [Cached(source)]
    with objects_kept(loader):
        assert next(iter(loader[0])) == 0
    assert list(loader[0]) == list(loader[0]) == [0, 1, 2]


def test_what_a_finished_generator_has_left_is_restored() -> None:
    loader = Cached(n for n in range(3))
    assert list(loader) == [0, 1, 2]
    with objects_kept([loader]):
        loader.items.clear()
    assert loader.items == [0, 1, 2]
