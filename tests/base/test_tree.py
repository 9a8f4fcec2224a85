"""Batches as trees: containers keep their types, leaves travel, sizes and paths are found."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from drivetrain.base.tree import batch_sizes, detach, leaves, map_leaves, move, was_there
from drivetrain.testing import FakeAccelerator

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    x: Any
    name: str = "plain"


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "frozen"


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclass
class Derived:
    x: Any
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.x)


class OwnList(list[Any]):
    pass


class Graph:
    """A batch that moves itself."""

    def __init__(self, device: Any = CPU) -> None:
        self.device = device

    def to(self, device: Any) -> Graph:
        return Graph(device)


class Encoding(dict[str, Any]):
    """A mapping that moves itself, as a tokenizer returns it."""

    moved_to: Any = None

    def to(self, device: Any) -> Encoding:
        copied = Encoding({key: value.to(device) for key, value in self.items()})
        copied.moved_to = device
        return copied


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize(
    ("tree", "inside"),
    [
        pytest.param([ones(2)], lambda t: t[0], id="list"),
        pytest.param((ones(2),), lambda t: t[0], id="tuple"),
        pytest.param(OwnList([ones(2)]), lambda t: t[0], id="list subclass"),
        pytest.param(Pair(ones(2), "label"), lambda t: t.x, id="named tuple"),
        pytest.param({"a": ones(2)}, lambda t: t["a"], id="dict"),
        pytest.param(OrderedDict(b=ones(2), a=1), lambda t: t["b"], id="OrderedDict"),
        pytest.param(defaultdict(list, a=ones(2)), lambda t: t["a"], id="defaultdict"),
        pytest.param(Plain(ones(2)), lambda t: t.x, id="dataclass"),
        pytest.param(Frozen(ones(2)), lambda t: t.x, id="frozen dataclass"),
        pytest.param(Slotted(ones(2)), lambda t: t.x, id="slotted dataclass"),
        pytest.param(Derived(ones(2)), lambda t: t.x, id="dataclass with a derived field"),
        pytest.param([{"a": (Pair(Frozen(ones(2)), 1),)}], lambda t: t[0]["a"][0].x.x, id="nested"),
    ],
)
def test_move_keeps_the_containers(tree: Any, inside: Any) -> None:
    moved = move(tree, META)
    assert type(moved) is type(tree)
    assert inside(moved).device == META
    assert inside(moved).shape == (2,)
    assert inside(tree).device == CPU  # the batch that came in is not changed


def test_move_keeps_what_a_mapping_knows_besides_its_items() -> None:
    default = move(defaultdict(list, a=ones(1)), META)
    assert default["missing"] == []
    assert list(move(OrderedDict(b=ones(1), a=ones(1)), META)) == ["b", "a"]


def test_other_leaves_pass_through() -> None:
    path, word = object(), "text"
    assert move([ones(1), word, path, None, 3], META)[1:] == [word, path, None, 3]
    assert move(Plain(ones(1), "kept"), META).name == "kept"
    assert move(Graph, META) is Graph  # a class with .to is no object that can move


def test_objects_that_move_themselves_are_asked() -> None:
    assert move(Graph(), META).device == META
    assert move([Graph()], META)[0].device == META
    encoding = move(Encoding(ids=ones(2)), META)
    assert (type(encoding), encoding.moved_to) == (Encoding, META)


class MovesInPlace:
    """A batch that moves itself in place, and returns nothing or itself."""

    def __init__(self, returns_itself: bool = False) -> None:
        self.x, self.returns_itself = ones(2), returns_itself

    def to(self, device: Any) -> Any:
        self.x = self.x.to(device)
        return self if self.returns_itself else None


@pytest.mark.parametrize("returns_itself", [False, True])
def test_an_object_that_moves_in_place_is_kept(returns_itself: bool) -> None:
    batch = MovesInPlace(returns_itself)
    assert move(batch, META) is batch
    assert batch.x.device == META
    nested = {"a": [MovesInPlace(returns_itself), ones(1)]}
    moved = move(nested, META)
    assert moved["a"][0] is nested["a"][0]
    assert moved["a"][0].x.device == moved["a"][1].device == META


@pytest.mark.parametrize("batch", [MovesInPlace(), MovesInPlace(True), [MovesInPlace()], {"x": ones(1)}, "text"])
def test_that_a_batch_was_there_is_known_of_tensors_only(batch: Any) -> None:
    assert not was_there(batch, move(batch, CPU))


@pytest.mark.parametrize("batch", [ones(1), [ones(1)], (ones(1), ones(2))])
def test_tensors_that_were_there_are_what_they_are(batch: Any) -> None:
    assert was_there(batch, move(batch, CPU))
    assert not was_there(batch, move(batch, META))


def test_a_packed_sequence_moves_itself() -> None:
    packed = pack_sequence([ones(2), ones(1)])
    moved = move(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU  # torch insists on it


@pytest.mark.parametrize("tree", [ones(2), [ones(2)], (ones(2), ones(3))], ids=["tensor", "list", "tuple"])
def test_the_same_object_comes_back_when_nothing_moves(tree: Any) -> None:
    assert move(tree, CPU) is tree


def test_leaves_that_are_there_already_are_not_copied() -> None:
    x = ones(2)
    tree = {"a": [x], "b": Pair(x, x), "c": [x, 1]}
    moved = move(tree, CPU)
    assert moved["a"][0] is moved["b"].y is moved["c"][0] is x


def test_move_of_a_mixture_moves_only_the_rest() -> None:
    there, here = ones(2).to(META), ones(2)
    moved = move([there, here], META)
    assert moved[0] is there
    assert moved[1].device == META


@pytest.mark.parametrize("device", [torch.device("cpu", 0), "cpu:0"], ids=repr)
def test_a_copy_to_a_device_does_not_block_and_one_to_the_host_does(device: Any) -> None:
    """A copy to the host is read at once, and nothing but waiting orders it before that."""
    with FakeAccelerator.recording() as record:
        there = move([ones(2), {"x": ones(3)}], device)
        move(there, CPU)
    assert [(each.target, each.blocking) for each in record.moves] == [(0, False)] * 2 + [(None, True)] * 2


def test_map_leaves_reaches_every_leaf_once() -> None:
    seen: list[Any] = []
    mapped = map_leaves(lambda leaf: seen.append(leaf) or leaf * 2, {"a": [1, (2, 3)], "b": Pair(4, Plain(5, 6))})
    assert seen == [1, 2, 3, 4, 5, 6]
    assert mapped == {"a": [2, (4, 6)], "b": Pair(8, Plain(10, 12))}


def test_t23_detach_cuts_every_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    tree = {"a": [x * 2], "b": Pair(x * 3, "text"), "c": Plain(x * 4)}
    cut = detach(tree)
    assert not cut["a"][0].requires_grad
    assert not cut["b"].x.requires_grad
    assert not cut["c"].x.requires_grad
    assert cut["b"].y == "text"
    assert tree["a"][0].requires_grad  # the control: there was a graph to cut
    assert torch.equal(cut["b"].x, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("tree", "sizes"),
    [
        (ones(5, 2), [5]),
        (torch.tensor(1.0), [1]),
        ([ones(3), ones(4, 1)], [3, 4]),
        ((ones(3), torch.tensor(2)), [3, 1]),
        ({"text": "abc", "x": ones(2)}, [2]),
        (["abc", b"abc"], []),
        (OrderedDict(b=ones(7), a=ones(6)), [7, 6]),
        (Plain(ones(4)), [4]),
        (Pair([ones(1), [ones(2)]], {"z": ones(3)}), [1, 2, 3]),
        ({"deep": [Frozen({"x": ones(9)})]}, [9]),
        (ones(0, 3), [0]),
        ([1, 2.0, None], []),
        (Plain, []),
    ],
)
def test_t9_batch_sizes(tree: Any, sizes: list[int]) -> None:
    assert list(batch_sizes(tree)) == sizes


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, [("", 1)]),
        ([1, 2], [("0", 1), ("1", 2)]),
        ({"a": {"b": 1}, "c": 2}, [("a/b", 1), ("c", 2)]),
        ({"a": [1, (2, 3)]}, [("a/0", 1), ("a/1/0", 2), ("a/1/1", 3)]),
        ({0: "text"}, [("0", "text")]),
        ([], []),
        (Pair(1, [2]), [("0", 1), ("1/0", 2)]),
    ],
)
def test_leaves_and_their_paths(tree: Any, expected: list[tuple[str, Any]]) -> None:
    assert list(leaves(tree)) == expected
