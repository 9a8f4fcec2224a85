"""What plans say of the memory of published runs, as benchmarks/RESULTS.md has it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.forecast.memory_rows import HEAD, ROWS

LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
PAGE = (Path(__file__).parents[2] / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def test_the_page_has_all_rows_and_their_errors_are_small() -> None:
    """Also those that are planned badly; and a plan fits nowhere where the run did not."""
    rows = [line for line in PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines() if line]
    published = ["out of memory" if row.published is None else f"{row.published} GiB" for row in ROWS]
    shown = [f"| {row.name} | {size} |" for row, size in zip(ROWS, published, strict=True)]
    assert [line[: len(begin)] for line, begin in zip(rows, shown, strict=True)] == shown
    told = re.findall(r"([+-]\d+\.\d)% \|$", "\n".join(rows), flags=re.MULTILINE)
    errors = [abs(float(each)) for each in told]
    assert len(errors) == sum(row.published is not None for row in ROWS)
    assert median(errors) <= 10
    assert max(errors) <= 20
    assert f"The median error is {median(errors):.1f} %, the worst {max(errors):.1f} %" in PAGE
    assert [line.rpartition("% ")[2] for line in rows if "out of memory" in line] == [
        line for line in rows if line.endswith("| does not fit |")
    ]
    assert [each for each in {row.source for row in ROWS} if each not in PAGE] == []


@LONG
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_page_has(row: Any) -> None:
    assert row.line(row.found) in PAGE
