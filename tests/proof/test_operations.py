"""The first operation that differs between two ranks, whose batches differ, and between two versions of torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain.proof.operations import Operations, first_change, first_difference


def recorded(path: Path, number: int, change: Callable[[nn.Linear], object] | None) -> Path:
    """Write the operations of a rank: its own batch, the same gradients, and a step with ``foreach``."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    mode = Operations()
    with mode:
        model(torch.full((2, 3), float(number))).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.copy_(torch.ones(1, 3))  # as a reduction does
        if change is not None:
            change(model)
        torch._foreach_add_([model.weight.data, model.bias.data], 1.0)
        [each.detach() for each in model.parameters() if number == 0]  # as rank 0 does, which saves
    names: dict[str, dict[str, Tensor]] = {
        "parameters": dict(model.named_parameters()), "gradients": {"weight": model.weight.grad},
    }  # fmt: skip
    mode.name(names)
    mode.write(path)
    return path


def flip(model: nn.Linear) -> object:
    return model.weight.data.view(torch.int32)[0, 1].bitwise_xor_(1 << 12)


def add(model: nn.Linear) -> object:
    assert model.weight.grad is not None
    return model.weight.grad.add_(1.0)


@pytest.mark.parametrize(
    ("change", "tensor", "operation"),
    [(flip, "parameters: weight", "aten.bitwise_xor_.Scalar"), (add, "gradients: weight", "aten.add_.Tensor")],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_operation_of_one_rank_is_named(
    change: Callable[[nn.Linear], object], tensor: str, operation: str, culprit: int, tmp_path: Path
) -> None:
    paths = [recorded(tmp_path / str(n), n, change if n == culprit else None) for n in range(2)]
    text = first_change(*paths, (0, 1), tensor)
    assert text.startswith(
        f"first operation that only rank {culprit} has: {operation} in tests/proof/test_operations.py:"
    )


@pytest.mark.parametrize("tensor", ["parameters: weight", "parameters: bias", "gradients: weight"])
def test_none_is_named_where_the_ranks_have_changed_nothing_differently(tensor: str, tmp_path: Path) -> None:
    paths = [recorded(tmp_path / str(number), number, None) for number in range(2)]
    assert first_change(*paths, (0, 1), tensor).startswith(f"no operation of this step has changed {tensor!r} in one")


def test_a_step_with_foreach_counts_with_the_values_that_it_leaves(tmp_path: Path) -> None:
    """Its operations return nothing; the ranks made equal changes until then."""
    paths = [
        recorded(tmp_path / "0", 0, lambda model: torch._foreach_mul_([model.weight.data], 2.0)),
        recorded(tmp_path / "1", 1, lambda model: torch._foreach_mul_([model.weight.data], 3.0)),
    ]
    text = first_change(*paths, (0, 1), "parameters: weight")
    assert text.startswith("first operation with another result: aten._foreach_mul_.Scalar in tests/proof/test_op")


def test_gradients_that_nothing_reduces_are_told(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        weight = torch.ones(3, requires_grad=True)
        with Operations() as mode:
            (weight * float(number)).sum().backward()
        assert weight.grad is not None
        mode.name({"gradients": {"weight": weight.grad}})
        paths.append(tmp_path / str(number))
        mode.write(paths[-1])
    text = first_change(*paths, (0, 1), "gradients: weight")
    assert text.startswith("first operation with another result: aten.mul.Tensor in ")
    assert text.endswith("; no later one made it equal, as a reduction does")


@pytest.mark.parametrize("lost", [0, 1])
def test_an_operation_that_only_one_run_has_at_the_end_is_not_passed_off_as_equal(lost: int, tmp_path: Path) -> None:
    """Such as the clipping of gradients that a program leaves out after its restart."""
    clipped = [*OLD, ["aten.mul_", "d", "train.py:3", []]]
    for name, found in (("old", OLD if lost == 0 else clipped), ("new", OLD if lost == 1 else clipped)):
        (tmp_path / name).write_text(json.dumps(found))
    text = first_difference(tmp_path / "old", tmp_path / "new", has_same_start=False)
    assert text.endswith("or only one run has the operation")


OLD = [["aten.mm", "a", "train.py:1", []], ["aten.view", "b", "train.py:1", []], ["aten.sum", "c", "train.py:2", []]]


@pytest.mark.parametrize(
    ("has_same_torch", "total", "text"),
    [
        (True, "c", "first operation that the other run has not: aten._unsafe_view in train.py:1"),
        (False, "d", "first operation with another result: aten.sum in train.py:2"),
        (False, "c", "first operation that the other run has not: aten._unsafe_view in train.py:1"),
    ],
)
def test_what_another_torch_calls_in_between_is_passed_over_unless_all_else_is_equal(
    has_same_torch: bool, total: str, text: str, tmp_path: Path
) -> None:
    new = [OLD[0], ["aten._unsafe_view", "b", "train.py:1", []], OLD[1], ["aten.sum", total, "train.py:2", []]]
    for name, operations in (("old", OLD), ("new", new)):
        (tmp_path / name).write_text(json.dumps(operations))
    assert first_difference(tmp_path / "old", tmp_path / "new", True, has_same_torch) == text
