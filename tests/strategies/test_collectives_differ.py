"""Where ranks do not do the same: every rank raises the same error, none waits for ever, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import DrivetrainError
from drivetrain.strategies.group import TorchGroup


def outer_ranks() -> Any:
    """Ranks 0 and 2 of 3; torch's mark of a group of others on rank 1. Every rank must call it."""
    return dist.new_group([0, 2])


def refused(call: Callable[[], Any]) -> str:
    """What the error says; "nothing" if there is none."""
    try:
        call()
    except DrivetrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


NAMES: list[tuple[list[list[str]], list[str]]] = [
    # each rank's names -> what every rank's error says
    ([["a", "b"], ["a"], ["a"]], ["rank 0 has 'b'; ranks 1, 2 has none of them"]),
    ([["a", "b"], ["a", "c"], ["a"]], ["rank 0 has 'b'; rank 1 has 'c'; rank 2 has none of them"]),
    ([["a", "b"], ["b", "a"], ["a", "b"]], ["in different order", "ranks 0, 2: 'a', 'b'; rank 1: 'b', 'a'"]),
    ([["a", "a"], ["a"], ["a"]], ["in different order or number", "rank 0: 'a', 'a'; ranks 1, 2: 'a'"]),
    ([[f"n{i}" for i in range(20)], [], []], ["'n0'", "'n7' and 12 more"]),
    ([["x" * 300 + "a"], ["x" * 300 + "b"], ["x" * 300 + "a"]], ["xa'; rank 1", "xb'"]),
    ([["a"], ["a"], ["a"]], ["nothing"]),  # the control
]


def gather_under(cases: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    rank = dist.get_rank()
    return [
        refused(lambda names=names[rank]: TorchGroup().gather_keyed(names, torch.zeros(len(names)))) for names in cases
    ]


def test_t8_different_names_are_an_error_needs_every_rank_that_says_who_lacks_what(pool: Any) -> None:
    for found in pool.run(gather_under, [names for names, _ in NAMES], world_size=3):
        for text, (names, wanted) in zip(found, NAMES, strict=True):
            assert all(part in text for part in wanted), (names, text)
            assert text == "nothing" or text.endswith("outside of conditions that differ between ranks.")


def differ() -> dict[str, str]:
    first, group = dist.get_rank() == 0, outer_ranks()
    ones, row = torch.ones, torch.zeros(2, dtype=torch.float64)
    leaf = torch.ones(2, requires_grad=True)
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: TorchGroup().all_gather(ones(2) if first else ones(3)),
        "dimensions": lambda: TorchGroup().all_gather(ones(2) if first else ones(2, 1)),
        "type": lambda: TorchGroup().all_gather(ones(2) if first else ones(2).double()),
        "gradients": lambda: TorchGroup().all_gather(leaf, sync_grads=first),
        "no tensor": lambda: TorchGroup().all_gather(ones(2) if first else 1.0),  # type: ignore[arg-type]
        "reduced shape": lambda: TorchGroup().all_reduce(ones(2) if first else ones(3)),
        "operation": lambda: TorchGroup().all_reduce(ones(2), op="mean" if first else "sum"),
        "function": lambda: TorchGroup().all_reduce(ones(2)) if first else TorchGroup().barrier(),
        "barrier": lambda: TorchGroup().barrier(name="a" if first else "b"),
        "question": lambda: TorchGroup().reduce_boolean_decision(True, all=first),
        "length": lambda: TorchGroup().gather_keyed(["a"], row if first else row[:1]),
        "row": lambda: TorchGroup().gather_keyed(["a"], row if first else row[None]),
        "keyed and not": lambda: TorchGroup().gather_keyed(["a"], row) if first else TorchGroup().all_gather(row),
        "control": lambda: TorchGroup().all_gather(ones(2)),
        "in a group": lambda: TorchGroup(group).all_gather(ones(2) if first else ones(3)),
        "control in a group": lambda: TorchGroup(group).all_gather(ones(2)),
    }
    return {name: refused(call) for name, call in calls.items()}


DIFFERENCES = {
    "shape": ["rank 0: all_gather(float32 of shape (2,)); ranks 1, 2: all_gather(float32 of shape (3,))", "Pad "],
    "dimensions": ["float32 of shape (2, 1)"],
    "type": ["all_gather(float64 of shape (2,))"],
    "gradients": ["rank 0: all_gather(float32 of shape (2,), with gradients)"],
    "no tensor": ["all_gather(a float: 1.0, which is not a tensor)"],
    "reduced shape": ["rank 0: reduce(mean of float32 of shape (2,))", "the same shape and dtype"],
    "operation": ["ranks 1, 2: reduce(sum of float32"],
    "function": ["rank 0: reduce(", "ranks 1, 2: barrier()", "the same calls in the same order"],
    "barrier": ["rank 0: barrier('a'); ranks 1, 2: barrier('b')"],
    "question": ["rank 0: reduce_boolean_decision(all=True)"],
    "length": ["rank 0: gather_keyed(1 names, float64 of shape (2,))"],
    "row": ["gather_keyed(1 names, float64 of shape (1, 2))"],
    "keyed and not": ["gather_keyed(", "all_gather(", "the same calls"],
    "control": ["nothing"],
}


def test_t8_where_ranks_differ_every_rank_raises_and_the_group_goes_on(pool: Any) -> None:
    for rank, found in enumerate(pool.run(differ, world_size=3)):
        for name, parts in DIFFERENCES.items():
            assert all(part in found[name] for part in parts), (name, found[name])
        if rank == 1:
            assert "rank 1, which is not a member of the given group" in found["in a group"]
            assert "is not a member" in found["control in a group"]
        else:
            assert "rank 0: all_gather(float32 of shape (2,)); rank 2: all_gather(" in found["in a group"]
            assert found["control in a group"] == "nothing"


def call_on_one(comes: bool) -> str | None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1 if not comes else 30))
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=30))
    if dist.get_rank() == 1 and not comes:
        store.get("rank 0 has given up")
        return None
    text = refused(lambda: TorchGroup().all_reduce(torch.ones(1)))
    store.set("rank 0 has given up", "1")
    return text


def test_t8_a_rank_that_never_comes_is_an_error_after_the_groups_timeout(pool: Any) -> None:
    text, nothing = pool.run(call_on_one, False, group=False)
    assert text.startswith("DrivetrainError: Rank 0 waited in reduce(mean of float32 of shape (1,)) for ranks 0, 1")
    assert nothing is None
    assert pool.run(call_on_one, True, group=False) == ["nothing", "nothing"]  # the control


# ---- what cannot be done at all --------------------------------------------------------------------------------------


def reduce_what_has_no_such_operation() -> list[str]:
    half, other = dist.get_rank() == 0, torch.ones(2, dtype=torch.complex64)
    return [
        refused(lambda: TorchGroup().all_reduce(other, op="max")),
        refused(lambda: TorchGroup().all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)),
        refused(lambda: TorchGroup().all_reduce(torch.ones(2, dtype=torch.uint64))),
        refused(lambda: TorchGroup().all_reduce(torch.ones(2).to_sparse() if half else torch.ones(2))),
    ]


def test_a_type_without_the_operation_is_an_error_needs_every_rank(pool: Any) -> None:
    for complex_, bits, unsigned, sparse in pool.run(reduce_what_has_no_such_operation):
        assert "max of complex64 of shape (2,)" in complex_
        assert "band of float32" in bits
        assert "mean of uint64" in unsigned
        assert "rank 0: reduce(a tensor that is no dense block" in sparse


def broadcast_wrongly() -> list[str]:
    rank, group = dist.get_rank(), outer_ranks()
    found = [
        refused(lambda: TorchGroup().broadcast(1, src=rank)),
        refused(lambda: TorchGroup().broadcast(1, src=3)),
        refused(lambda: TorchGroup().broadcast(lambda: None)),
        refused(lambda: TorchGroup(group).broadcast(1, src=1)),
        refused(lambda: TorchGroup().gather_objects((lambda: None) if rank == 1 else 1)),
    ]
    return [
        *found,
        str(TorchGroup().broadcast(rank, 1)),
        str(TorchGroup().gather_objects(rank)),
    ]  # the group still works


def test_an_object_that_cannot_travel_is_an_error_needs_every_rank(pool: Any) -> None:
    for rank, found in enumerate(pool.run(broadcast_wrongly, world_size=3)):
        differ, outside, unpicklable, not_in_group, one_unpicklable, control, other_control = found
        assert "rank 0: broadcast(src=0); rank 1: broadcast(src=1)" in differ
        assert "src=3, which is not among the group's global ranks [0, 1, 2]" in outside
        assert "rank 0: broadcast(an object that cannot be pickled: " in unpicklable
        assert "ranks 1, 2: broadcast(src=0)" in unpicklable
        assert ("is not a member" if rank == 1 else "src=1, which is not among the group's global ranks [0, 2]") in (
            not_in_group
        )
        assert "rank 1: gather_objects(an object that cannot be pickled" in one_unpicklable
        assert (control, other_control) == ("1", "[0, 1, 2]")
