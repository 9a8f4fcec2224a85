"""What ranks do together: each operation on 1, 2 and 3 processes, in groups, and what happens where ranks differ."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from math import inf, isnan, nan, prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import ConfigurationError, UnknownNameError
from drivetrain.strategies.group import LoneGroup, TorchGroup

BOOL, FLOATS, COMPLEX = [torch.bool], [torch.float16, torch.bfloat16, torch.float32, torch.float64], [torch.complex64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REAL = [*BOOL, *INTEGERS, *FLOATS]
WHOLE_JOBS = [1, 2, 3]


def outer_ranks() -> Any:
    """Ranks 0 and 2 of 3; torch's mark of a group of others on rank 1. Every rank must call it."""
    return dist.new_group([0, 2])


def equal(one: Any, other: Any) -> bool:
    """The same type, shape and values, to the last bit."""
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)


# ---- reduce ----------------------------------------------------------------------------------------------------------

# What rank 0, 1 and 2 bring; all results below are exact in every type.
NUMBERS = [[1, 3, 0], [2, 4, 0], [6, 5, 0]]


def number(value: int, dtype: torch.dtype) -> Any:
    """``value`` as ``dtype`` has it."""
    return complex(value, -value) if dtype.is_complex else torch.tensor(value).to(dtype).item()


def reduced(reduce_op: str, dtypes: Sequence[torch.dtype]) -> Any:
    rank, found = dist.get_rank(), {}
    group = outer_ranks() if dist.get_world_size() == 3 else None
    for dtype in dtypes:
        mine = torch.tensor([number(value, dtype) for value in NUMBERS[rank]], dtype=dtype)
        before = mine.clone()
        result = TorchGroup().all_reduce(mine, reduce_op)
        outer = TorchGroup(group).all_reduce(mine, reduce_op) if group is not None and rank != 1 else None
        found[dtype] = result, outer, equal(mine, before), result is mine
    return found


OPERATIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda values: sum(values) / len(values), "sum": sum, "product": prod, "min": min, "max": max
}  # fmt: skip


def expected(reduce_op: str, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
    columns = zip(*[[number(value, dtype) for value in NUMBERS[rank]] for rank in ranks], strict=True)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    result = {"mean": torch.float64, "sum": torch.int64, "product": torch.int64}.get(reduce_op, dtype)
    return torch.tensor([OPERATIONS[reduce_op](column) for column in columns], dtype=result if whole else dtype)


@pytest.mark.parametrize("world_size", WHOLE_JOBS)
@pytest.mark.parametrize("reduce_op", OPERATIONS)
def test_t7_reduce_of_every_type_changes_no_input(pool: Any, reduce_op: str, world_size: int) -> None:
    dtypes = REAL if reduce_op in ("min", "max") else [*REAL, *COMPLEX]
    for rank, found in enumerate(pool.run(reduced, reduce_op, dtypes, world_size=world_size)):
        for dtype, (result, outer, unchanged, same) in found.items():
            assert unchanged, dtype
            assert same == (world_size == 1), dtype  # alone, nothing is done
            if world_size > 1:
                assert equal(result, expected(reduce_op, dtype, range(world_size))), dtype
            if world_size == 3 and rank != 1:
                assert equal(outer, expected(reduce_op, dtype, [0, 2])), dtype


def reduce_each(rows: Sequence[tuple[Any, Any, torch.dtype]]) -> list[Any]:
    """One reduction for each row: an operation, one value per rank, and their type."""
    rank = dist.get_rank()
    return [TorchGroup().all_reduce(torch.tensor(values[rank], dtype=dtype), op=name) for name, values, dtype in rows]


EXACT: list[tuple[str, list[Any], torch.dtype, Any, torch.dtype]] = [
    # operation, one value per rank, their type -> result, its type
    ("mean", [1, 2, 2], torch.int64, 5 / 3, torch.float64),
    ("mean", [True, False, True], torch.bool, 2 / 3, torch.float64),
    ("sum", [200, 100, 0], torch.uint8, 300, torch.int64),
    ("sum", [2**31 - 1, 1, 0], torch.int32, 2**31, torch.int64),
    ("mean", [256, 1, 1], torch.bfloat16, 86, torch.bfloat16),  # 256 + 1 is 256 in bfloat16
    ("sum", [256, 1, 1], torch.bfloat16, 258, torch.bfloat16),
    ("mean", [60000, 60000, 60000], torch.float16, 60000, torch.float16),  # their sum is none of its numbers
    ("sum", [2**24, 1, 1], torch.float32, 2**24 + 2, torch.float32),
    ("mean", [3e38, 3e38, 3e38], torch.float32, 3e38, torch.float32),
    ("sum", [448, 0.5, -448], torch.float8_e4m3fn, 0.5, torch.float8_e4m3fn),
    ("max", [2**62, 2**62 + 1, 0], torch.int64, 2**62 + 1, torch.int64),  # no float holds it
    ("min", [inf, -inf, 0], torch.float32, -inf, torch.float32),
    ("max", [-inf, -inf, -inf], torch.float16, -inf, torch.float16),
]


def test_t7_reduce_loses_nothing_on_the_way(pool: Any) -> None:
    rows = [(name, values, dtype) for name, values, dtype, *_ in EXACT]
    for results in pool.run(reduce_each, rows, world_size=3):
        for (name, values, _, result, dtype), found in zip(EXACT, results, strict=True):
            assert equal(found, torch.tensor(result, dtype=dtype)), (name, values)


@pytest.mark.parametrize("reduce_op", OPERATIONS)
def test_one_ranks_nan_is_every_ranks_result(pool: Any, reduce_op: str) -> None:
    rows = [(reduce_op, [nan if rank == bad else 1.0 for rank in range(3)], torch.float32) for bad in range(3)]
    for results in pool.run(reduce_each, [*rows, (reduce_op, [1.0, 1.0, 1.0], torch.float32)], world_size=3):
        assert [isnan(result.item()) for result in results] == [True, True, True, False]


def reduce_by_every_name() -> Any:
    mine = torch.tensor([6, 3][dist.get_rank()])
    ops = [getattr(dist.ReduceOp, name) for name in ("AVG", "SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")]
    names = [None, "mean", "avg", "AVG", "sum", "min", "max", "product", "prod"]
    return [TorchGroup().all_reduce(mine, op=op).item() for op in [*names, *ops, dist.ReduceOp(dist.ReduceOp.SUM)]]


def test_c12_an_operation_has_torchs_names_too_and_is_the_mean_by_default(pool: Any) -> None:
    named = [4.5, 4.5, 4.5, 4.5, 9, 3, 6, 18, 18]
    assert pool.run(reduce_by_every_name) == [[*named, 4.5, 9, 3, 6, 18, 6 & 3, 6 | 3, 6 ^ 3, 9]] * 2


@pytest.mark.parametrize("reduce_op", ["average", "band", "", 3, dist.ReduceOp, dist.ReduceOp.PREMUL_SUM])
def test_an_unknown_operation_is_refused_also_alone(reduce_op: Any) -> None:
    with pytest.raises(UnknownNameError, match="reduce_op=.*Known: avg, max, mean"):
        LoneGroup().all_reduce(torch.ones(1), reduce_op)


def reduce_oddly_shaped() -> Any:
    rank = dist.get_rank()
    leaf = torch.ones(2, requires_grad=True)
    table = torch.arange(6.0).view(2, 3)
    results = [
        TorchGroup().all_reduce(table.t() + rank, op="sum"),
        TorchGroup().all_reduce(table[:, ::2], op="sum"),
        TorchGroup().all_reduce(torch.zeros(0, 3), op="max"),
        TorchGroup().all_reduce(torch.tensor(5 + rank), op="min"),
        TorchGroup().all_reduce((table + 1j * table).conj(), op="sum"),
        TorchGroup().all_reduce(leaf * 3),
    ]
    only_here = [TorchGroup().all_reduce(value) for value in (3, "x", None)] if rank == 0 else None
    return results, [result.requires_grad for result in results], only_here


def test_reduce_takes_every_shape_and_hands_on_what_is_no_tensor(pool: Any) -> None:
    table = torch.arange(6.0).view(2, 3)
    shapes = [2 * table.t() + 1, 2 * table[:, ::2], torch.zeros(0, 3), torch.tensor(5), 2 * (table - 1j * table)]
    for rank, (results, with_gradient, only_here) in enumerate(pool.run(reduce_oddly_shaped)):
        for result, wanted in zip(results, [*shapes, torch.full((2,), 3.0)], strict=True):
            assert equal(result, wanted)
        assert not any(with_gradient)
        assert only_here == ([3, "x", None] if rank == 0 else None)  # asked on one rank only: nobody waits


# ---- all_gather ------------------------------------------------------------------------------------------------------

ALL_TYPES = [*REAL, *COMPLEX, torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2]


def of_every_shape(rank: int) -> list[Tensor]:
    table = torch.arange(6.0).view(2, 3) + rank
    shapes = [table, table[0, 0], table[:0], table.t(), table[:, ::2], (1j * table).conj(), (1j * table).conj().imag]
    return [*shapes, *(table.to(dtype) for dtype in ALL_TYPES)]


def gathered() -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = outer_ranks() if world_size == 3 else None
    found = []
    for tensor in of_every_shape(rank):
        outer = TorchGroup(group).all_gather(tensor) if group is not None and rank != 1 else None
        found.append((TorchGroup().all_gather(tensor), outer))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_c13_all_gather_stacks_every_shape_and_type(pool: Any, world_size: int) -> None:
    each = [of_every_shape(rank) for rank in range(world_size)]
    for rank, found in enumerate(pool.run(gathered, world_size=world_size)):
        for (result, outer), *mine in zip(found, *each, strict=True):
            assert equal(result, torch.stack(mine))
            if world_size == 3 and rank != 1:
                assert equal(outer, torch.stack([mine[0], mine[2]]))


def gather_with_gradients() -> Any:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.full((2,), float(rank + 1), dtype=dtype, requires_grad=True)
        stack = TorchGroup().all_gather(x, sync_grads=True)
        weights = torch.tensor([1.0, 10.0, 100.0], dtype=dtype)[:, None] * (rank + 1)
        (stack**2 * weights).sum().backward()
        found[str(dtype)] = stack.detach(), x.grad
    scalar = torch.tensor(2.0, requires_grad=True)
    (TorchGroup().all_gather(scalar, sync_grads=True)[0] * (rank + 1)).backward()
    found["scalar"] = scalar.grad
    found["not asked"] = TorchGroup().all_gather(x).requires_grad
    with torch.no_grad():
        found["no grad"] = TorchGroup().all_gather(x, sync_grads=True).requires_grad
    found["none required"] = TorchGroup().all_gather(torch.ones(1), sync_grads=True).requires_grad
    group = outer_ranks()
    if rank != 1:
        y = torch.tensor([float(rank)], requires_grad=True)
        (TorchGroup(group).all_gather(y, sync_grads=True) * torch.tensor([[1.0], [10.0]])).sum().backward()
        found["group"] = y.grad
    return found


def test_s2_2_the_gradient_is_the_sum_of_every_ranks_gradient_of_the_slice(pool: Any) -> None:
    for rank, found in enumerate(pool.run(gather_with_gradients, world_size=3)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            stack, gradient = found[str(dtype)]
            assert equal(stack, torch.tensor([[1.0] * 2, [2.0] * 2, [3.0] * 2], dtype=dtype))
            # of sum over ranks r of (r + 1) * 10^mine * x^2
            wanted = 2 * (rank + 1) * 10**rank * (1 + 2 + 3)
            assert equal(gradient, torch.tensor([wanted] * 2, dtype=dtype))
        assert found["scalar"].item() == (6 if rank == 0 else 0)  # the others' slices were not used
        assert not found["not asked"]
        assert not found["no grad"]
        assert not found["none required"]
        if rank != 1:
            assert found["group"].item() == (2 if rank == 0 else 20)


def twice_differentiated() -> Any:
    x = torch.tensor([1.0 + dist.get_rank()], dtype=torch.float64, requires_grad=True)
    loss = (TorchGroup().all_gather(x, sync_grads=True).sum() ** 3) * (dist.get_rank() + 1)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    first.sum().backward()
    return first.item(), x.grad.item() if x.grad is not None else None


def test_gradients_through_all_gather_have_gradients(pool: Any) -> None:
    # Both ranks' losses together: 3 s^3 with s = 3; each rank's first is 9 s^2. Both firsts together: 18 s^2.
    assert pool.run(twice_differentiated) == [(81.0, 108.0)] * 2


# ---- broadcast and objects -------------------------------------------------------------------------------------------


class Thing:
    """Something of the user's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


OBJECTS = [None, 0, "é" * 1000, {"a": [1, (2.5, None)]}, Thing({"x": 1}), b"\0" * 300_000, torch.float32, Thing]


def broadcast_objects(src: int) -> Any:
    rank = dist.get_rank()
    found = [TorchGroup().broadcast(obj if rank == src else "elsewhere", src) for obj in OBJECTS]
    mixed = {"weights": torch.ones(2) * rank, "rank": rank}
    received = TorchGroup().broadcast(mixed, src)
    parameter = TorchGroup().broadcast(torch.nn.Parameter(torch.ones(2) * rank) if rank == src else None, src)
    sparse = TorchGroup().broadcast(torch.eye(2).to_sparse() * rank, src)
    outer = None
    if dist.get_world_size() == 3:
        group = outer_ranks()
        outer = TorchGroup(group).broadcast(rank, 2) if rank != 1 else None
        group = dist.new_group([1, 2])
        outer = TorchGroup(group).broadcast([rank] * 100, 1)[0] if rank != 0 else outer
    return found, received, type(parameter), parameter.tolist(), sparse.to_dense(), outer, received is mixed


@pytest.mark.parametrize(("world_size", "src"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_c11_broadcast_of_any_object_from_any_global_rank(pool: Any, world_size: int, src: int) -> None:
    for rank, run in enumerate(pool.run(broadcast_objects, src, world_size=world_size)):
        found, received, kind, parameter, sparse, outer, same = run
        assert found == OBJECTS
        assert received["rank"] == src
        assert equal(received["weights"], torch.ones(2) * src)
        assert (kind, parameter) == (torch.nn.Parameter, [src, src])
        assert equal(sparse, torch.eye(2) * src)
        assert same == (rank == src)
        assert outer == ([2, 1, 1][rank] if world_size == 3 else None)


def broadcast_tensors() -> Any:
    rank = dist.get_rank()
    mine = of_every_shape(rank)
    found = [TorchGroup().broadcast(tensor if rank == 1 else None, 1) for tensor in mine]
    leaf = torch.ones(2, requires_grad=True) if rank == 1 else torch.zeros(5)
    received = TorchGroup().broadcast(leaf * 2 if rank == 1 else leaf, 1)
    received.sum().backward()
    return found, received.detach(), leaf.grad if rank == 1 else received.grad, leaf.shape


def test_s2_5_broadcast_of_tensors_of_every_shape_and_type(pool: Any) -> None:
    for rank, (found, received, gradient, shape) in enumerate(pool.run(broadcast_tensors)):
        for result, wanted in zip(found, of_every_shape(1), strict=True):
            assert equal(result, wanted)
        assert equal(received, torch.full((2,), 2.0))
        assert gradient.tolist() == ([2.0, 2.0] if rank == 1 else [1.0, 1.0])  # a leaf where it was received
        assert tuple(shape) == ((2,) if rank == 1 else (5,))  # what the receiver brought is not changed


def gather_objects() -> Any:
    rank = dist.get_rank()
    mine = ["x" * 10_000 * rank, Thing(rank)]
    found = TorchGroup().gather_objects(mine)
    outer = TorchGroup(group).gather_objects(rank) if (group := outer_ranks()) is not None and rank != 1 else None
    return found, outer, found[rank] is mine


def test_objects_of_different_sizes_are_gathered_in_the_order_of_ranks(pool: Any) -> None:
    for rank, (found, outer, own) in enumerate(pool.run(gather_objects, world_size=3)):
        assert found == [["x" * 10_000 * other, Thing(other)] for other in range(3)]
        assert outer == (None if rank == 1 else [0, 2])
        assert own


def loads(objects: Sequence[Any]) -> tuple[list[Any], int]:
    """What rank 0 brings, as it comes back from rank 1, and how often torch.load was called for it."""
    calls = []
    load = torch.load
    torch.load = lambda *args, **options: (calls.append(args), load(*args, **options))[1]  # type: ignore[assignment, func-returns-value]
    try:
        found = [TorchGroup().gather_objects(obj)[1 - dist.get_rank()] for obj in objects]
    finally:
        torch.load = load
    return found, len(calls)


def test_objects_without_tensors_are_loaded_without_torch(pool: Any) -> None:
    plain = [
        None,
        3,
        "text",
        {"a": [1, (2, 3)]},
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        ValueError("x"),
    ]
    for found, calls in pool.run(loads, plain):
        assert calls == 0
        assert list(map(repr, found)) == list(map(repr, plain))


def test_objects_with_tensors_are_loaded_by_torch(pool: Any) -> None:
    tensors = [torch.ones(2), {"deep": [torch.nn.Parameter(torch.ones(1))]}, torch.ones(2).untyped_storage()]
    for found, calls in pool.run(loads, tensors):
        assert calls == len(tensors)
        assert equal(found[0], tensors[0])
        assert type(found[1]["deep"][0]) is torch.nn.Parameter


# ---- decisions and waiting -------------------------------------------------------------------------------------------


def decide() -> Any:
    rank, found = dist.get_rank(), []
    for votes in ([False] * 3, [True, False, False], [False, True, True], [True] * 3):
        found.append([TorchGroup().reduce_boolean_decision(votes[rank], all=every) for every in (True, False)])
    return found


def test_a_decision_is_everybodys_or_anybodys(pool: Any) -> None:
    assert pool.run(decide, world_size=3) == [[[False, False], [False, True], [False, True], [True, True]]] * 3


def wait() -> bool | None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("rank 0 has been waiting")
        TorchGroup().barrier(name="here")
        return None
    waiting = threading.Thread(target=TorchGroup().barrier, kwargs={"name": "here"})
    waiting.start()
    waiting.join(0.2)
    was_waiting = waiting.is_alive()
    store.set("rank 0 has been waiting", "1")
    waiting.join()
    return was_waiting


def test_a_barrier_holds_until_all_have_come(pool: Any) -> None:
    assert pool.run(wait) == [True, None]


# ---- names and numbers -----------------------------------------------------------------------------------------------


def gather_keyed() -> Any:
    rank = dist.get_rank()
    sums = torch.tensor([2.0**53 + 2 * rank, 0.1, rank, 4.0], dtype=torch.float64, requires_grad=rank == 0)
    return [
        TorchGroup().gather_keyed(["loss", "accuracy"], sums),
        TorchGroup().gather_keyed([], torch.zeros(0, dtype=torch.float64)),
        TorchGroup().gather_keyed(["x" * 1000], torch.tensor([float(rank)])),
    ]


@pytest.mark.parametrize("world_size", WHOLE_JOBS)
def test_t8_numbers_are_gathered_under_their_names(pool: Any, world_size: int) -> None:
    rows = [[2.0**53 + 2 * rank, 0.1, rank, 4.0] for rank in range(world_size)]
    for sums, nothing, single in pool.run(gather_keyed, world_size=world_size):
        assert equal(sums, torch.tensor(rows, dtype=torch.float64))
        assert not sums.requires_grad
        assert equal(nothing, torch.zeros(world_size, 0, dtype=torch.float64))
        assert equal(single, torch.arange(float(world_size))[:, None])


# ---- alone -----------------------------------------------------------------------------------------------------------


def alone() -> list[bool]:
    """Whether each method of a process group of one gives back what it got."""
    x, obj = torch.ones(2, requires_grad=True), object()
    group = TorchGroup(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    stack, detached = group.all_gather(x, sync_grads=True), group.all_gather(x)
    return [
        stack.tolist() == detached.tolist() == [[1, 1]] and stack.requires_grad and not detached.requires_grad,
        group.all_reduce(x) is x,
        group.broadcast(obj, 0) is obj,
        operator.is_(group.gather_objects(obj)[0], obj),
        group.reduce_boolean_decision(True),
        not group.reduce_boolean_decision(False, all=False),
        group.gather_keyed(["a"], x).shape == (1, 2),
        [each.tolist() for each in group.reduce_keyed(["a"], x, x + 1)] == [[1, 1], [2, 2]],
        group.barrier() is None,  # type: ignore[func-returns-value]
        _one_row_is_asked_for(group),
    ]


def _one_row_is_asked_for(group: TorchGroup) -> bool:
    with pytest.raises(ConfigurationError, match=r"shapes \[\(1, 2\)\].*one row"):
        group.gather_keyed(["a"], torch.ones(1, 2))
    return True


def test_s2_2_without_others_everything_is_as_it_was(pool: Any) -> None:
    for world_size in (1, 3):  # a group of one, of one process and of several
        for found in pool.run(alone, world_size=world_size):
            assert all(found)
