"""What can be asked of a CombinedLoader and set on it: its length, limits, loaders, samplers and states (trap T38)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from drivetrain.data.combined import CombinedLoader
from drivetrain.errors import CheckpointError, ConfigurationError

INF = float("inf")
MODES = ["min_size", "max_size_cycle", "max_size", "sequential"]


class Source:
    """Gives ``name0, name1, ...``; writes down when it is started and drawn from."""

    def __init__(self, name: str, stop: float, events: list[str] | None = None) -> None:
        self.name, self.stop = name, stop
        self.events: list[str] = [] if events is None else events

    def __iter__(self) -> Iterator[str]:
        self.events.append(f"{self.name} start")
        return self._batches()

    def _batches(self) -> Iterator[str]:
        number = 0
        while number < self.stop:
            self.events.append(f"{self.name}{number}")
            yield f"{self.name}{number}"
            number += 1


class Sized(Source):
    def __len__(self) -> int:
        return int(self.stop)


def batches(combined: CombinedLoader) -> list[Any]:
    return [batch for batch, _, _ in combined]


# ---- the length and the limits ---------------------------------------------------------------------------------------

SIZES = (2, 5)


@pytest.mark.parametrize(
    ("mode", "limits", "length"),
    [
        ("min_size", None, 2),
        ("max_size", None, 5),
        ("max_size_cycle", None, 5),
        ("sequential", None, 7),
        ("min_size", INF, 2),
        ("min_size", 1, 1),
        ("max_size", 3, 3),
        ("max_size_cycle", 3, 3),
        ("sequential", 3, 5),
        ("min_size", [9, 1], 1),
        ("max_size", [1, 4], 4),
        ("max_size_cycle", (1, 4), 4),
        ("sequential", [INF, 4], 6),
        ("max_size", [0, 4], 4),
        ("sequential", [0, np.int64(4)], 4),
        ("min_size", 0, 0),
        ("max_size", 0, 0),
        ("max_size_cycle", 0, 0),
        ("sequential", 0, 0),
    ],
)
def test_t38_length_before_iter_and_what_is_given_under_limits(mode: str, limits: Any, length: int) -> None:
    events: list[str] = []
    combined = CombinedLoader([Sized(name, size, events) for name, size in zip("ab", SIZES, strict=True)], mode)
    combined.limits = limits
    assert len(combined) == length
    assert events == []
    assert len(list(combined)) == length


def test_t38_a_limited_loader_starts_again_at_its_limit() -> None:
    combined = CombinedLoader([Source("a", INF), Sized("b", 5)], "max_size_cycle")
    combined.limits = [2, 3]
    assert batches(combined) == [["a0", "b0"], ["a1", "b1"], ["a0", "b2"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_of_0_starts_nothing(mode: str) -> None:
    events: list[str] = []
    combined = CombinedLoader([Source("a", 3, events)], mode)
    combined.limits = 0
    assert (list(combined), events) == ([], [])
    assert len(combined) == 0  # known, although the loader has no length


def test_no_batch_is_drawn_beyond_a_limit() -> None:
    for mode in MODES:
        events: list[str] = []
        combined = CombinedLoader([Source("a", INF, events)], mode)
        combined.limits = 2
        assert len(list(combined)) == 2
        assert [event for event in events if event[1].isdigit()] == ["a0", "a1"]


def test_limits_read_back_and_can_be_taken_away() -> None:
    combined = CombinedLoader([range(2), range(5)], "sequential")
    assert combined.limits is None
    combined.limits = 3
    assert combined.limits == [3, 3]
    combined.limits = None
    assert (combined.limits, len(combined)) == (None, 7)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([1], "set to 1 numbers for 2 loaders"),
        ([1, 2, 3], "set to 3 numbers for 2 loaders"),
        (0.5, "holds 0.5, which is no number of batches"),
        (1.0, "holds 1.0, which is no number of batches"),
        ([1, -1], "holds -1, which"),
        (float("nan"), "holds nan, which"),
    ],
)
def test_limits_that_are_none(limits: Any, message: str) -> None:
    combined = CombinedLoader([range(2), range(5)])
    combined.limits = 1
    with pytest.raises(ConfigurationError, match=message):
        combined.limits = limits
    assert combined.limits == [1, 1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unsized", [Source("a", 2), DataLoader(Stream())], ids=["source", "stream"])
@pytest.mark.parametrize("limits", [None, 2])
def test_t38_a_loader_without_a_length_makes_it_unknown(mode: str, unsized: Any, limits: int | None) -> None:
    combined = CombinedLoader([range(3), unsized], mode)
    combined.limits = limits
    with pytest.raises(
        TypeError, match=rf"mode='{mode}'\) is unknown, because its loader 1, a {type(unsized).__name__}"
    ):
        len(combined)


def test_a_length_that_raises_something_else_is_not_hidden() -> None:
    class Broken(Source):
        def __len__(self) -> int:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        len(CombinedLoader([Broken("a", 1)]))


# ---- its loaders -----------------------------------------------------------------------------------------------------


def test_flattened_can_be_set() -> None:
    combined = CombinedLoader({"x": Source("a", 2), "y": (Source("b", 2),)})
    iterator = iter(combined)
    assert next(iterator)[0] == {"x": "a0", "y": ("b0",)}
    other = [Source("c", 2), Source("d", 2)]
    combined.flattened = other
    assert combined.flattened == other
    assert combined.iterables == {"x": other[0], "y": (other[1],)}
    assert list(iterator) == [({"x": "a1", "y": ("b1",)}, 1, 0)]  # a pass that is under way goes on
    assert batches(combined) == [{"x": "c0", "y": ("d0",)}, {"x": "c1", "y": ("d1",)}]


def test_setting_flattened_leaves_the_users_tree_as_it_is() -> None:
    tree = [Source("a", 1)]
    given = list(tree)
    CombinedLoader(tree).flattened = [Source("b", 1)]
    assert tree == given


def test_flattened_is_a_copy() -> None:
    combined = CombinedLoader([range(1)])
    combined.flattened.clear()
    assert combined.flattened == [range(1)]


def test_flattened_must_fit_the_tree() -> None:
    combined = CombinedLoader([range(1), range(2)])
    with pytest.raises(ConfigurationError, match="set to 1 loaders, but its tree has places for 2"):
        combined.flattened = [range(1)]
    with pytest.raises(ConfigurationError, match="Leaf 1 of CombinedLoader's tree is None"):
        combined.flattened = [range(1), None]
    assert combined.flattened == [range(1), range(2)]


def test_samplers_stand_where_their_loaders_do() -> None:
    sampler = RandomSampler(range(4))
    batch_sampler = BatchSampler(sampler, 2, False)
    plain = DataLoader(TensorDataset(torch.arange(4)), sampler=sampler, batch_size=None)
    batched = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=batch_sampler)
    combined = CombinedLoader({"a": plain, "b": [batched, range(3)]})
    assert combined.sampler == {"a": sampler, "b": [batched.sampler, None]}
    assert combined.batch_sampler == {"a": None, "b": [batch_sampler, None]}


class Stateful(Sized):
    """Remembers how many batches it gave."""

    position = 0

    def _batches(self) -> Iterator[str]:
        while self.position < self.stop:
            self.position += 1
            yield f"{self.name}{self.position - 1}"
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_states_are_those_of_the_loaders_that_have_them() -> None:
    combined = CombinedLoader([Stateful("a", 4), range(4)])
    next(iter(combined))
    states = combined.state_dict()
    assert states == [{"position": 1}, None]
    other = CombinedLoader([Stateful("a", 4), range(4)])
    given_up = iter(other)
    next(given_up)
    other.load_state_dict(states)
    assert list(given_up) == []
    assert batches(other) == [["a1", 0], ["a2", 1], ["a3", 2]]


def test_states_of_other_loaders_are_refused_before_any_is_used() -> None:
    stateful = Stateful("a", 4)
    combined = CombinedLoader([stateful, range(4)])
    with pytest.raises(CheckpointError, match="states of 1 loaders, and this CombinedLoader has 2"):
        combined.load_state_dict([{"position": 2}])
    with pytest.raises(CheckpointError, match="a state of loader 1, and the range there has no load_state_dict"):
        combined.load_state_dict([{"position": 2}, {"position": 2}])
    assert stateful.position == 0


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_it_can_be_copied_and_sent_to_another_process(again: Any) -> None:
    combined = CombinedLoader({"a": range(3), "b": [range(2)]}, "max_size")
    combined.limits = [1, 2]
    iterator = iter(combined)
    next(iterator)
    other = again(combined)
    other.reset()
    assert (other.mode, other.limits, batches(other)) == (
        "max_size",
        [1, 2],
        [{"a": 0, "b": [0]}, {"a": None, "b": [1]}],
    )
    assert next(iterator)[1] == 1  # the original's pass goes on


def test_passes_are_independent() -> None:
    combined = CombinedLoader([range(3)])
    assert [(a, b) for (a, _, _), (b, _, _) in zip(combined, combined, strict=True)] == [([i], [i]) for i in range(3)]
