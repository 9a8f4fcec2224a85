"""What the forecast of time says of runs that others have published, and of passes that were measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.forecast.llama import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Run, window
from tests.forecast.published import GRAND_TETON, ROWS, TIMED, pairs_in_order, table, timed_table
from tests.forecast.records import steps_of

from drivetrain.forecast.devices import device_of
from drivetrain.forecast.exchange import forecast
from drivetrain.forecast.operations import Exchange

PAGE = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}: {row.name}")
def test_a_published_run_is_at_most_twice_as_slow_as_at_best(row: Any) -> None:
    """And none is faster: no constant was fitted to these rows, see devices.py."""
    assert 0.5 <= row.factor <= 1


def speeds(rows: list[Any]) -> list[tuple[float, float]]:
    return [(row.speed, row.predicted) for row in rows]


def within_tables(speeds: Callable[[list[Any]], list[tuple[float, float]]]) -> tuple[int, int]:
    """Count pairs of the same model and the same devices, which is harder to get right."""
    tables: dict[str, list[Any]] = {}
    for row in ROWS:
        tables.setdefault(row.table, []).append(row)
    counts = [pairs_in_order(speeds(rows)) for rows in tables.values()]
    return sum(right for right, _ in counts), sum(pairs for _, pairs in counts)


def test_configurations_are_in_the_published_order() -> None:
    assert len(ROWS) >= 15
    for right, pairs in (pairs_in_order(speeds(ROWS)), within_tables(speeds)):
        assert right / pairs >= 0.9
    page = PAGE.read_text(encoding="utf-8")
    (right, pairs), (inner, of) = pairs_in_order(speeds(ROWS)), within_tables(speeds)
    assert f"{right} of {pairs} pairs" in page
    assert f"{inner} of {of} pairs" in page


def test_arithmetic_alone_does_not_give_the_order() -> None:
    """The negative control of the test above: without bytes and exchanges, many of these pairs are alike or wrong."""

    def arithmetic(rows: list[Any]) -> list[tuple[float, float]]:
        return [(row.speed, row.run.tokens / row.told.arithmetic) for row in rows]

    right, pairs = within_tables(arithmetic)
    assert right / pairs < 0.9


@pytest.mark.parametrize("timed", TIMED, ids=lambda each: f"{each.batch} {each.checkpoints} {each.compiled}")
def test_a_measured_pass_takes_a_little_longer_than_at_best(timed: Any) -> None:
    assert 0.85 <= timed.told.step / timed.seconds <= 1


def test_the_models_have_the_parameters_of_their_names() -> None:
    sizes = [size.parameters / 1e9 for size in (LLAMA3_8B, LLAMA3_70B, LLAMA3_405B)]
    assert sizes == pytest.approx([8.03, 70.55, 405.85], rel=1e-3)


def test_the_page_has_all_rows_with_their_errors() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page
    assert timed_table() in page
    assert [each for each in {row.source for row in ROWS} if each not in page] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child process copies itself")
def test_the_record_of_a_program_and_the_record_of_these_tests_agree(programs: Any, tmp_path: Path) -> None:
    """The same Llama as a program with a Trainer. drivetrain's FSDP gathers the last block again in the backward pass,
    and torchtitan does not; the norm of clipping is one number.
    """
    recorded = steps_of(programs, tmp_path, 8, Path(__file__).with_name("recorded_llama.py"))
    written, device = window(Run(replace(LLAMA3_8B, layers=3), 2, 8192, 8, "none")), device_of(GRAND_TETON)
    block = next(each for each in recorded if isinstance(each, Exchange) and each.phase == "backward")
    more = [("all_gather", block.bytes), ("all_reduce", 4)]
    ours, theirs = ([(e.name, e.bytes) for e in steps if isinstance(e, Exchange)] for steps in (written, recorded))
    sizes = [size for _, size in sorted(ours + more)]
    assert [name for name, _ in sorted(theirs)] == [name for name, _ in sorted(ours + more)]
    assert [size for _, size in sorted(theirs)] == pytest.approx(sizes, rel=1e-4)  # norms are not in the written ones
    best, recorded_best = forecast(written, device, 8), forecast(recorded, device, 8)
    assert recorded_best.arithmetic == pytest.approx(best.arithmetic, rel=0.01)
    assert recorded_best.step == pytest.approx(best.step, rel=0.04)
