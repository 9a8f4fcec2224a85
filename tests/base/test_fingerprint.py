"""Fingerprints: each bit and each place counts, equal bits are equal, and many tensors need few operations."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.base.fingerprint import ROW, fingerprints
from drivetrain.errors import NotSupportedError

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY = [*FLOATS, *INTEGERS, *COMPLEX]


def number(tensor: Tensor) -> int:
    return int(fingerprints([tensor]))


def values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Different values, so that each swap changes the tensor."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flipped(tensor: Tensor, place: int, bit: int) -> Tensor:
    copy = tensor.clone()
    raw = copy.view(-1).view(torch.uint8)
    raw[place * copy.element_size() + bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.int8, torch.int64])
def test_each_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    start = values(17, dtype)
    bits = 8 * start.element_size()
    tensors = [start, *(flipped(start, place, bit) for place in range(17) for bit in range(bits))]
    assert len(set(fingerprints(tensors).tolist())) == 1 + 17 * bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_two_flipped_bits_change_it(dtype: torch.dtype) -> None:
    start = values(9, dtype)
    last = 8 * start.element_size() - 1
    once = [flipped(start, place, last) for place in range(9)]
    twice = [flipped(once[a], b, last) for a in range(9) for b in range(a)]
    assert len(set(fingerprints([start, *once, *twice]).tolist())) == 1 + 9 + 36


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8])
def test_each_swap_changes_it(dtype: torch.dtype) -> None:
    start = values(64, dtype)
    tensors = [start]
    for a in range(64):
        for b in range(a):
            tensors.append(start.clone())
            tensors[-1][[a, b]] = tensors[-1][[b, a]]
    assert len(set(fingerprints(tensors).tolist())) == 1 + 64 * 63 // 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_swap_of_a_value_with_its_negative_changes_it(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1.0, -1.0, 3.0]).to(dtype), torch.tensor([-1.0, 1.0, 3.0]).to(dtype)
    assert number(one) != number(other)


@pytest.mark.parametrize("count", [ROW - 1, ROW, ROW + 1, 3 * ROW + 5, (1 << 20) + ROW + 3])
def test_long_tensors_count_each_bit_and_place_too(count: int) -> None:
    start = values(count)
    moved = torch.cat([start[ROW:], start[:ROW]])
    across = start.clone()
    across[[0, count - 1]] = across[[count - 1, 0]]
    found = fingerprints([start, moved, start.roll(2), across, flipped(start, 0, 3), flipped(start, count - 1, 31)])
    same = 1 if count <= ROW else 0  # a row moved behind itself is the same tensor
    assert len(set(found.tolist())) == 6 - same


def test_what_an_exclusive_or_does_not_see() -> None:
    zeros, ones = torch.zeros(8), torch.ones(8)
    assert torch.hash_tensor(zeros).equal(torch.hash_tensor(ones))  # why torch's function is not used
    assert number(zeros) != number(ones)


def test_zeros_of_different_lengths_differ() -> None:
    lengths = [0, 1, 2, 8, ROW, ROW + 1]
    assert len(set(fingerprints([torch.zeros(length) for length in lengths]).tolist())) == len(lengths)


def test_signs_of_zero_and_bits_of_nan_count() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    tensors = [*nans.view(4, 1), torch.tensor([0.0]), torch.tensor([-0.0])]
    assert len(set(fingerprints(tensors).tolist())) == 6
    assert number(nans[1]) == number(nans[1].clone())


@pytest.mark.parametrize("dtype", EVERY)
def test_a_tensor_and_its_copy_are_equal_in_each_dtype(dtype: torch.dtype) -> None:
    start = values(30).to(dtype)
    assert number(start) == number(start.clone())
    assert dtype == torch.bool or number(start) != number(values(30, seed=1).to(dtype))


def test_layout_in_memory_does_not_count_but_order_does() -> None:
    table = values(60).view(6, 10)
    assert number(table.t()) == number(table.t().contiguous()) != number(table)
    assert number(table[::2, 1:]) == number(table[::2, 1:].clone())
    assert number(values(60).view(1, 2, 5, 6).to(memory_format=torch.channels_last)) == number(table)


def test_conjugate_and_negative_views_count_as_their_values() -> None:
    pairs = torch.complex(values(6), values(6, seed=1))
    for view in (pairs.conj(), pairs.conj().imag, torch._neg_view(pairs), torch._neg_view(pairs).conj()):
        assert view.is_conj() or view.is_neg()
        assert number(view) == number(view.resolve_conj().resolve_neg().clone()) != number(pairs)


def test_scalars_empty_tensors_and_parameters() -> None:
    assert number(torch.tensor(3.0)) == number(torch.tensor([3.0])) != number(torch.tensor(4.0))
    assert number(torch.empty(0)) == number(torch.empty(3, 0))
    assert number(torch.nn.Parameter(torch.ones(3))) == number(torch.ones(3))
    assert fingerprints([]).tolist() == []


def test_both_forms_are_equal() -> None:
    tensors = [values(1 + 7 * i).to(dtype) for i, dtype in enumerate(EVERY * 3)]
    tensors += [torch.tensor(1.5), torch.empty(0), values(ROW), values(2 * ROW + 1), values(5, torch.float64)]
    found = fingerprints(tensors)
    assert found.dtype == torch.int64
    assert found.tolist() == [number(tensor) for tensor in tensors]
    assert found.flip(0).equal(fingerprints(tensors[::-1]))


def test_the_default_device_of_torch_changes_nothing() -> None:
    tensor = torch.arange(5.0)
    with torch.device("meta"):
        found, none = fingerprints([tensor]), fingerprints([])
    assert torch.equal(found, fingerprints([tensor]))
    assert none.device.type == "cpu"


def test_more_tensors_than_are_read_at_once() -> None:
    tensors = [values(10 + i) for i in range(200)]
    assert fingerprints(tensors).tolist() == [number(tensor) for tensor in tensors]


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_sparse_tensors_count_their_stored_parts() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    other = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        assert number(dense.to_sparse(layout=layout)) == number(dense.clone().to_sparse(layout=layout))
        assert number(dense.to_sparse(layout=layout)) != number(other.to_sparse(layout=layout))


def test_of_a_dtensor_the_local_part_counts() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        shard = distribute_tensor(values(8), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        assert number(shard) == number(values(8)[:4]) != number(values(8))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["meta", "quantized"])
def test_a_tensor_without_readable_bits_is_refused(kind: str) -> None:
    ones = torch.ones(3)
    tensor = ones.to("meta") if kind == "meta" else torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    with pytest.raises(NotSupportedError, match=r"dtype=.*Leave this tensor out, or pass a dense copy"):
        fingerprints([tensor])


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that compute or copy; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


def operations(tensors: list[Tensor]) -> list[str]:
    fingerprints(tensors)  # the weights are made once
    seen = Operations()
    with seen:
        fingerprints(tensors)
    return seen.names


def test_operations_do_not_grow_with_the_number_of_small_tensors() -> None:
    few, many = operations([values(9)] * 2), operations([values(9)] * 60)
    assert len(few) == len(many) < 40


def test_nothing_waits_for_the_device() -> None:
    assert not {"aten._local_scalar_dense.default", "aten.item.default"} & set(operations([values(ROW + 3)] * 3))
