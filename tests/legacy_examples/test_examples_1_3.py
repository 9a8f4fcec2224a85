"""The official examples of Lightning 1.3.8, unchanged, on stand-in data: each does what docs/legacy.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.legacy_examples.fetch import folder_of
from tests.legacy_examples.running import examples, listed, programs_in, result_of, run, what_was_done
from tests.legacy_examples.table import Row

from drivetrain.legacy.migrate.program import migrate

PACKAGE = "examples_1_3"


@examples(PACKAGE)
def test_an_example(row: Row, offline: None, data: Path, programs: Any, tmp_path: Path) -> None:
    assert result_of(row, PACKAGE, data, programs, tmp_path) == row.does


def test_the_table_lists_every_example() -> None:
    assert listed(PACKAGE) == programs_in(PACKAGE)


def test_a_rewritten_example_trains_without_exec(programs: Any, tmp_path: Path) -> None:
    original = folder_of(PACKAGE) / "pl_examples" / "bug_report_model.py"
    source = migrate(original.name, original.read_bytes())
    assert [remark for remark in source.remarks if remark.is_left] == []
    (tmp_path / original.name).write_bytes(source.content())
    done = run(programs, tmp_path, PACKAGE, original.name)
    assert (done.returncode, what_was_done(done.stdout)) == (0, "trains and tests")
