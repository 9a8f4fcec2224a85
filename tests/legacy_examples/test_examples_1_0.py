"""The official examples of Lightning 1.0.8, unchanged, on stand-in data: each does what docs/legacy.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.legacy_examples.running import examples, listed, programs_in, result_of
from tests.legacy_examples.table import Row

PACKAGE = "examples_1_0"


@examples(PACKAGE)
def test_an_example(row: Row, offline: None, data: Path, programs: Any, tmp_path: Path) -> None:
    assert result_of(row, PACKAGE, data, programs, tmp_path) == row.does


def test_the_table_lists_every_example() -> None:
    assert listed(PACKAGE) == programs_in(PACKAGE)
