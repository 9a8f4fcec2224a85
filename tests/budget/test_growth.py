"""What should be flat is flat: counts of ``benchmarks/growth.py``, whose times and plot are in RESULTS.md."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def growth(benchmark: Any) -> Any:
    benchmark.callbacks(0, timed=False)  # imports what a fit imports late
    return benchmark


def test_a_step_costs_the_same_after_2000_steps(growth: Any) -> None:
    early, late = growth.steps([600, 2000])
    assert early["calls per step"] == late["calls per step"] > 5


def test_idle_callbacks_cost_no_step_anything(growth: Any) -> None:
    one, hundred = (growth.callbacks(count, timed=False) for count in (1, 100))
    assert one["calls per step"] == hundred["calls per step"] > 5
    assert hundred["bytes of a checkpoint"] <= one["bytes of a checkpoint"] + 100 * 64


def test_keys_cost_no_more_each_where_there_are_more(growth: Any) -> None:
    ten, thousand = (growth.keys(count, timed=False) for count in (10, 1000))
    assert 1 < thousand["calls per key and step"] <= ten["calls per key and step"]
    assert thousand["calls per step"] > 50 * ten["calls per step"]  # the negative control: what grows is counted


def test_tensors_cost_a_step_nothing_and_a_set_up_and_a_checkpoint_no_more_each(growth: Any) -> None:
    few, many = (growth.tensors(count, timed=False) for count in (100, 1_000))
    assert few["calls per step"] == many["calls per step"] > 5
    for name in ("calls in set-up per tensor", "calls in a checkpoint per tensor"):
        assert 0 < many[name] <= few[name]
