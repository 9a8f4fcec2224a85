"""Copies of tensors in shared memory: equal, tied as before, in memory that is used again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
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
    memory.fill()
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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_copied(memory: Arena, layout: torch.layout) -> None:
    tensor = (2 * torch.eye(3).requires_grad_()).to_sparse(layout=layout)  # with a graph, which deepcopy refuses
    held = copied({"a": tensor}, memory.hold)["a"]
    tensor.detach().values().zero_()
    assert held.layout is layout
    assert torch.equal(held.to_dense(), 2 * torch.eye(3))


def test_a_copy_requires_a_gradient_as_the_tensor_does(memory: Arena) -> None:
    for wanted in (True, False, True):  # the memory is the same
        memory.clear()
        held = copied({"a": torch.ones(2, requires_grad=wanted)}, memory.hold)["a"]
        assert held.requires_grad is wanted


def test_states_of_changing_sizes_leave_nothing_behind(memory: Arena) -> None:
    memory.hold([torch.ones(10_000)])
    memory.fill()
    counts = []
    for size in range(1, 1000, 100):
        memory.clear()
        memory.hold([torch.ones(size), torch.ones(3), torch.ones(5)])
        memory.fill()
        gc.collect()
        counts.append(sum(type(each) is Tensor for each in gc.get_objects()))
    assert counts[-1] == counts[2]


CLOSED = """
import os
os.close(0)
from drivetrain.checkpoints.arena import Arena
print(Arena().descriptor > 2)
"""


def test_the_memory_is_no_standard_stream() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout == "True\n", done.stderr


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
    memory.fill()
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


def test_values_are_copied_when_it_is_filled(memory: Arena) -> None:
    values = torch.zeros(10)
    (copy,) = memory.hold([values])
    values.fill_(1.0)
    memory.fill()
    values.fill_(2.0)
    memory.fill()  # nothing new
    assert torch.equal(copy, torch.ones(10))
    assert memory.hold([]) == []


def test_a_device_copies_into_locked_memory_at_once_and_is_waited_for(
    memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None: ...

        def record(self, stream: object) -> None:
            calls.append("copies")

        def synchronize(self) -> None:
            calls.append("wait")

    monkeypatch.setattr(arena, "HOST", torch.device("meta"))  # so that the processor counts as a device
    monkeypatch.setattr(arena, "_pin", lambda *place: lambda: calls.append("unlock"))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    memory.hold([torch.zeros(10)])
    assert calls == []  # the memory is locked when its size is known
    memory.fill()
    memory.wait()
    memory.clear()
    values = torch.ones(10)
    (copy,) = memory.hold([values])
    assert calls == ["copies", "wait", "copies"]
    values.zero_()
    memory.fill()
    memory.hold([torch.ones(100_000)])
    assert calls[3:] == ["wait", "unlock"]  # before the memory that has become too small is unlocked
    assert torch.equal(copy, torch.ones(10))


def test_the_memory_that_is_left_is_that_of_the_system() -> None:
    found = arena.available_memory()
    assert 2**20 < found < 2**50


def test_where_the_system_has_no_files_in_memory_a_temporary_one_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Arena()
    (copy,) = made.hold([torch.arange(1000)])
    made.fill()
    assert copy.tolist() == list(range(1000))
    assert os.listdir(tmp_path) == []
    made.close()
