"""Many values are read together, and each is the number of ``item()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.logbook.reading import read_together
from drivetrain.testing import FakeAccelerator

DEVICE = torch.device("cpu", 0)
VALUES = [
    torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(1e-7, dtype=torch.float16), torch.tensor(-7), torch.tensor(True), torch.tensor([[3]]).byte(),
    torch.tensor(float("inf")), torch.tensor(2**53 - 1), torch.tensor(0.5, requires_grad=True),
]  # fmt: skip


@pytest.mark.parametrize(("has_float64", "transfers"), [(True, 1), (False, 7)])
def test_each_number_is_that_of_item(has_float64: bool, transfers: int) -> None:
    with FakeAccelerator.recording() as record:
        there = [value.to(DEVICE) for value in VALUES]
        before = len(record.syncs)
        numbers, count = read_together([*there, "text", 4], has_float64)
        assert len(record.syncs) - before == count == transfers
    expected = [*(value.item() for value in VALUES), "text", 4]
    assert numbers == expected
    assert list(map(type, numbers)) == list(map(type, expected))


@pytest.mark.parametrize("large", [2**53, 2**53 + 1, -(2**63)])
def test_an_integer_that_no_float_represents_is_read_by_itself(large: int) -> None:
    values: list[Any] = [torch.tensor(large), torch.tensor(0.5)]
    assert read_together(values, has_float64=True) == ([large, 0.5], 2)


def test_nan_and_complex_numbers() -> None:
    values = [torch.tensor(float("nan")), torch.tensor(1), torch.tensor(1 + 2j)]
    (nan, one, pair), transfers = read_together(values, has_float64=True)
    assert nan != nan
    assert (one, pair, transfers) == (1, 1 + 2j, 2)
