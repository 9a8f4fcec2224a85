"""The device as torch sees it: memory, random numbers, streams, copies, files, and what it counts."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vendor_device  # noqa: F401  # registers the device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lab: Any = torch.lab  # type: ignore[attr-defined]
ZERO, ONE = torch.device("lab:0"), torch.device("lab:1")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Each test begins on lab:0 with fresh counters."""
    lab.set_device(0)
    lab.reset_counters()
    yield
    lab.set_device(0)


# ---- devices -------------------------------------------------------------------------------------------------------


def test_it_is_torchs_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("lab")
    assert torch.accelerator.device_count() == lab.device_count() == 2
    assert torch.get_device_module("lab") is lab
    assert lab.get_device_properties(1) == ("lab 1", 4 * 2**30)


@pytest.mark.parametrize("make_current", [lab.set_device, torch.accelerator.set_device_index])
def test_a_device_without_a_number_is_the_current_one(make_current: Callable[[Any], None]) -> None:
    make_current(ONE)
    assert torch.ones(2, device="lab").device == ONE
    assert lab.current_device() == torch.accelerator.current_device_index() == 1
    with lab.device("lab:0"):
        assert torch.empty(1, device="lab").device == ZERO
    assert lab.current_device() == 1


def test_each_thread_has_a_current_device() -> None:
    lab.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(lab.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(1, device="lab:2"),
        lambda: lab.set_device(2),
        lambda: torch.ones(1, device=ONE).to("lab:2"),
        lambda: torch.Generator("lab:2"),
        lambda: torch.Stream("lab:2"),
        lambda: lab.memory_allocated(2),
    ],
)
def test_a_device_that_is_not_there(use: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="There is no device lab:2. Write lab:0 or lab:1."):
        use()
    assert lab.current_device() == 0


def test_a_device_of_another_kind() -> None:
    with pytest.raises(ValueError, match='\'cpu\' is no device of lab. Write "lab:0" or "lab:1".'):
        lab.set_device("cpu")


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="lab:1"):
        torch.ones(2, device=ZERO) + torch.ones(2, device=ONE)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_memory_is_counted_for_each_device() -> None:
    before = [lab.memory_allocated(index) for index in range(2)]
    big = torch.empty(1000, device=ONE)
    assert lab.memory_allocated(1) == before[1] + 4000
    assert lab.memory_allocated(0) == before[0]
    assert torch.accelerator.memory_allocated(1) == lab.memory_allocated("lab:1") == lab.memory_allocated(ONE)
    view = big[10:]
    del big
    assert lab.memory_allocated(1) == before[1] + 4000, "a view keeps it"
    del view
    assert lab.memory_allocated(1) == before[1]


def test_the_peak_stays_until_it_is_reset() -> None:
    lab.reset_peak_memory_stats(1)
    base = lab.memory_allocated(1)
    del [torch.empty(1000, device=ONE), torch.empty(500, device=ONE)][:]
    assert lab.max_memory_allocated(1) >= base + 6000
    assert lab.memory_stats(1)["allocated_bytes.all.peak"] == lab.max_memory_allocated(1)
    assert lab.memory_allocated(1) == base
    lab.reset_peak_memory_stats(1)
    assert lab.max_memory_allocated(1) == base
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert lab.memory_stats(1)["allocated_bytes.all.allocated"] == 0


def test_a_device_can_be_full() -> None:
    free, total = lab.mem_get_info(1)
    held = lab.memory_allocated(1)
    assert free == total - held
    with pytest.raises(torch.OutOfMemoryError, match="lab:1 is out of memory: 4294967300 bytes were asked for, and"):
        torch.empty(2**30 + 1, device=ONE)
    assert lab.memory_allocated(1) == held


def test_resizing() -> None:
    x = torch.arange(3.0, device=ONE)
    base = lab.memory_allocated(1)
    x.resize_(1000)
    assert x.device == ONE
    assert x[:3].tolist() == [0, 1, 2]
    assert lab.memory_allocated(1) == base - 12 + 4000
    x.untyped_storage().resize_(0)
    assert lab.memory_allocated(1) == base - 12


# ---- random numbers ------------------------------------------------------------------------------------------------


def draws(device: Any = "lab") -> Tensor:
    made = [
        torch.randn(5, device=device), torch.rand(5, device=device), torch.randperm(5, device=device),
        torch.randint(9, (5,), device=device), torch.ones(5, device=device).bernoulli_(0.5),
        torch.multinomial(torch.ones(5, device=device), 5), nn.functional.dropout(torch.ones(5, device=device), 0.5),
        nn.init.kaiming_uniform_(torch.empty(1, 5, device=device))[0],
    ]  # fmt: skip
    return torch.stack([value.double() for value in made]).cpu()


def test_the_same_seed_the_same_numbers_as_on_the_host() -> None:
    torch.manual_seed(3)
    there = draws()
    torch.manual_seed(3)
    assert torch.equal(draws("cpu"), there)
    torch.manual_seed(4)
    assert not torch.equal(draws(), there)


def test_devices_draw_from_generators_of_their_own() -> None:
    torch.manual_seed(3)
    host, first = torch.get_rng_state(), draws(ZERO)
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(draws(ZERO), first)
    assert torch.equal(draws(ONE), first)


def test_random_state_is_saved_and_restored() -> None:
    for index in range(2):
        state = lab.get_rng_state(index)
        assert state.dtype == torch.uint8
        assert state.device.type == "cpu"
        drawn = draws(f"lab:{index}")
        lab.set_rng_state(state, f"lab:{index}")
        assert torch.equal(draws(f"lab:{index}"), drawn)
        with torch.random.fork_rng([index], device_type="lab"):
            draws(f"lab:{index}")
        lab.set_rng_state(state, index)
        assert torch.equal(draws(f"lab:{index}"), drawn)


def test_seeds_of_one_device_and_of_all() -> None:
    torch.manual_seed(3)
    lab.set_device(1)
    lab.manual_seed(5)
    assert [generator.initial_seed() for generator in lab.default_generators] == [3, 5]
    assert lab.initial_seed() == 5
    lab.seed_all()
    assert lab.default_generators[0].initial_seed() == lab.default_generators[1].initial_seed() != 5


def test_a_generator_of_ones_own() -> None:
    own = torch.Generator(ONE).manual_seed(5)
    default = lab.get_rng_state(1)
    drawn = torch.rand(3, device=ONE, generator=own)
    assert own.device == ONE
    assert torch.equal(lab.get_rng_state(1), default)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), drawn.cpu())
    twin = torch.Generator(ONE)
    twin.set_state(own.get_state())
    assert torch.equal(torch.rand(3, device=ONE, generator=twin), torch.rand(3, device=ONE, generator=own))
    with pytest.raises(RuntimeError, match="Expected a 'lab' device type for generator but found 'cpu'"):
        torch.rand(3, device=ONE, generator=torch.Generator())


# ---- streams and events --------------------------------------------------------------------------------------------


def test_streams_become_current_and_give_way() -> None:
    default = lab.current_stream()
    stream = lab.Stream(ONE)
    with lab.stream(stream):
        assert lab.current_stream() == stream
        assert lab.current_device() == 1
    assert lab.current_stream() == default
    assert lab.Stream() != default
    assert stream.query()
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream(ONE) == stream
    assert torch.accelerator.current_stream(ZERO) == default


def test_events_tell_the_time_between_them() -> None:
    first, second = lab.Event(enable_timing=True), lab.Event(enable_timing=True)
    lab.current_stream().record_event(first)
    (torch.ones(200, 200, device=ZERO) @ torch.ones(200, 200, device=ZERO)).record_stream(lab.current_stream())
    second.record()
    lab.Stream().wait_event(second)
    second.synchronize()
    assert second.query()
    assert 0 < first.elapsed_time(second) < 60_000


# ---- copies and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "lab:0", "lab:1"])
@pytest.mark.parametrize("there", ["cpu", "lab:0", "lab:1"])
def test_copies_between_all_devices(there: str, to: str) -> None:
    x = torch.arange(12.0, device=there).view(3, 4)
    for made in (x, x.t(), x[1:, ::2], x.half(), x.long(), torch.complex(x, -x).conj(), x[:0]):
        moved = made.to(to)
        assert str(moved.device) == to
        assert moved.stride() == made.stride() or there == to or not made.is_contiguous()
        assert torch.equal(moved.cpu(), made.cpu())
        into = torch.empty_like(made, device=to).copy_(made, non_blocking=True)
        assert torch.equal(into.cpu(), made.cpu())


def test_the_names_that_torch_gives() -> None:
    x, linear = [getattr(there, "lab")(1) for there in (torch.ones(2), nn.Linear(1, 1))]  # noqa: B009  # not in stubs
    assert x.is_lab
    assert x.device == linear.weight.device == ONE
    assert "device='lab:1'" in repr(x)
    with torch.device(ONE):
        assert torch.ones(1).device == ONE


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor")  # older torch, about its own DataLoader
def test_pinned_memory() -> None:
    x = torch.ones(3).pin_memory()
    assert x.is_pinned()
    assert x[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()
    assert x.to(ONE, non_blocking=True).tolist() == [1, 1, 1]
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    assert [batch[0].is_pinned() for batch in loader] == [True, True]


@pytest.mark.parametrize(
    ("where", "expected"),
    [(None, "lab:1"), ("cpu", "cpu"), ("lab:0", "lab:0"), ("lab", "lab:0"), (ONE, "lab:1"), ({"lab:1": "cpu"}, "cpu")],
)
def test_saved_and_loaded(where: Any, expected: str) -> None:
    weight = nn.Parameter(torch.arange(4.0, device=ONE))
    file = io.BytesIO()
    torch.save({"weight": weight, "view": weight.detach()[1:]}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where)
    assert {str(value.device) for value in loaded.values()} == {expected}
    assert torch.equal(loaded["weight"].detach().cpu(), torch.arange(4.0))
    assert loaded["view"].data_ptr() == loaded["weight"].data_ptr() + 4


def test_what_the_host_saved_is_loaded_here() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    file.seek(0)
    loaded = torch.load(file, map_location="lab:1")
    assert loaded.device == ONE
    assert loaded.tolist() == [0, 1, 2]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.clone])
def test_clones(clone: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(3.0, device=ONE)
    again = clone(x)
    x.zero_()
    assert again.device == ONE
    assert again.tolist() == [0, 1, 2]


# ---- what it counts ------------------------------------------------------------------------------------------------

_x = torch.arange(4.0, device=ZERO)
_mask, _index = _x > 1, torch.tensor([1, 2], device=ZERO)


@pytest.mark.parametrize(
    ("use", "counted"),
    [
        (lambda: _x[0].item(), {"scalar_reads": 1}),
        (lambda: bool((_x > 0).all()), {"scalar_reads": 1}),
        (lambda: _x[_mask], {"shape_reads": 1}),
        (lambda: _mask.nonzero(), {"shape_reads": 1}),
        (lambda: torch.equal(_x, _x), {"shape_reads": 1}),
        (lambda: _x.tolist(), {"to_host": 1}),
        (lambda: _x.to("cpu", non_blocking=True), {"to_host_async": 1}),
        (lambda: torch.ones(2).to(ONE), {"to_device": 1}),
        (lambda: torch.ones(2).to(ONE, non_blocking=True), {"to_device_async": 1}),
        (lambda: _x.to(ONE), {"between_devices": 1}),
        (lambda: torch.accelerator.synchronize(), {"synchronizations": 1}),
        (lambda: lab.current_stream().synchronize(), {"synchronizations": 1}),
        (lambda: nn.utils.clip_grad_norm_([nn.Parameter(_x)], 1.0), {}),
        (lambda: _x[_index].add_(1).where(_x[_index] > 1, _x[_index]).sum().sqrt(), {}),
        (lambda: nn.functional.cross_entropy(torch.randn(2, 3, device=ZERO), _index), {}),
    ],
)
def test_counters(use: Callable[[], Any], counted: dict[str, int]) -> None:
    use()
    assert {name: count for name, count in lab.counters().items() if count} == counted
    waiting = {"scalar_reads", "shape_reads", "to_host", "synchronizations"}
    assert lab.waits() == sum(counted.get(name, 0) for name in waiting)
    lab.reset_counters()
    assert lab.waits() == 0
    assert not any(lab.counters().values())
