"""Copies of tensors in shared memory: equal, tied as before, in memory that is used again."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoints import arena
from drivetrain.checkpoints.arena import Arena, NoRoomError, copied, fresh


@pytest.fixture
def memory() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def tensors() -> dict[str, Any]:
    weight = torch.randn(3, 5)
    state = OrderedDict(weight=weight, step=torch.tensor(3))
    vars(state)["_metadata"] = {"version": 1}
    return {
        "state": state, "tied": weight, "half": torch.randn(7).bfloat16(), "mask": torch.tensor([True, False]),
        "images": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "turned": torch.randn(4, 2).t(),
        "wide": torch.ones(1).expand(4), "none": torch.empty(0, 3),
        "complex": torch.randn(2, dtype=torch.cfloat).conj(),
        "parameter": nn.Parameter(torch.randn(2), requires_grad=False), "sparse": torch.eye(3).to_sparse(),
        "rest": [1, {"name": ("x", torch.ones(2))}],
    }  # fmt: skip


def flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.to_dense() if tree.is_sparse else tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [each for value in values for each in flat(value)]


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_is_equal_and_apart(memory: Arena, shared: bool) -> None:
    tree = tensors()
    before = [each.clone() for each in flat(tree)]
    held = copied(tree, memory.hold if shared else fresh)
    for name in ("tied", "half", "mask", "images", "parameter"):  # training continues
        tree[name].data.zero_()
    for one, other in zip(flat(held), before, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert held["state"]["weight"] is held["tied"]
    assert vars(held["state"])["_metadata"] == {"version": 1}
    assert held["images"].stride() == tree["images"].stride()
    assert type(held["parameter"]) is nn.Parameter
    assert not held["parameter"].requires_grad
    assert held["rest"][1]["name"][0] == "x"


def test_the_next_checkpoint_uses_the_same_memory(memory: Arena) -> None:
    first = memory.hold([torch.ones(1000), torch.ones(10)])
    size, descriptors = memory.size, len(os.listdir("/proc/self/fd"))
    memory.clear()
    second = memory.hold([torch.zeros(1000), torch.zeros(10)])
    assert (memory.size, len(os.listdir("/proc/self/fd"))) == (size, descriptors)
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_what_is_held_stays_when_the_memory_grows_for_the_same_checkpoint(memory: Arena) -> None:
    (small,) = memory.hold([torch.ones(10)])
    (large,) = memory.hold([torch.full((100_000,), 2.0)])
    assert torch.equal(small, torch.ones(10))
    assert torch.equal(large, torch.full((100_000,), 2.0))
    places = [memory.place_of(each.untyped_storage()) for each in (small, large)]
    assert places == [64, 128]
    assert memory.place_of(torch.ones(2).untyped_storage()) is None


def test_without_room_nothing_is_copied(memory: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    size = memory.size
    monkeypatch.setattr(arena, "available_memory", lambda: 1000)
    with pytest.raises(NoRoomError, match=r"needs 4096 bytes more of host memory, and 1000 are available"):
        memory.hold([torch.ones(1024)])
    assert memory.size == size
    monkeypatch.setattr(arena, "available_memory", lambda: 5000)  # the control
    memory.hold([torch.ones(1024)])


def test_the_memory_that_is_left_is_that_of_the_system() -> None:
    found = arena.available_memory()
    assert found is not None
    assert 2**20 < found < 2**50
