"""A save that has a fault at any of its file operations leaves a complete checkpoint: the new one or the one before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.file_faults import KINDS

PROGRAM = Path(__file__).with_name("every_operation_program.py")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are copied, and orphans get another parent"),
    pytest.mark.timeout(3600),  # the long form takes minutes
]

SCENARIOS = ("file", "shards", "cycle", "cycle with a link")
SWEEPS = [(scenario, where, "") for scenario in SCENARIOS for where in ("plain", "training", "writing")]
# how many operations get each fault in `make test`; 0: all. `make test-faults` runs all sweeps with all operations.
SHORT = {
    ("file", "plain", ""): 0, ("file", "writing", ""): 2, ("shards", "plain", ""): 4, ("shards", "training", ""): 2,
    ("cycle", "plain", ""): 2, ("cycle with a link", "writing", ""): 1,
}  # fmt: skip
WRONG: dict[tuple[str, str, str], tuple[int, list[str]]] = {
    ("file", "plain", "files are written in place"): (4, ["ENOSPC", "kill"]),
    ("file", "writing", "files are written in place"): (4, ["ENOSPC"]),
    ("shards", "plain", "the files of the save before are removed before the manifest is written"): (12, ["kill"]),
    ("cycle with a link", "plain", "the checkpoint before is removed before the new one is written"): (4, ["kill"]),
}


@pytest.fixture(scope="module")
def results(programs: Any, tmp_path_factory: pytest.TempPathFactory, long_form: bool) -> dict[Any, dict[str, Any]]:
    """For each sweep the numbers of operations and of faults, and what was not as it must be."""
    kinds = KINDS if long_form else ("ENOSPC", "full", "kill")
    jobs: dict[Any, Any] = {sweep: (*sweep, 0, kinds) for sweep in SWEEPS} if long_form else {}
    jobs |= {sweep: (*sweep, most, kinds) for sweep, most in SHORT.items() if not long_form}
    jobs |= {sweep: (*sweep, *faults) for sweep, faults in WRONG.items()}
    folder, environ = tmp_path_factory.mktemp("faults"), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = programs.run(PROGRAM, json.dumps([*jobs.values()]), folder, cwd=folder, env=environ, timeout=3500)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("sweep", SWEEPS, ids=" ".join)
def test_a_fault_at_any_operation_leaves_a_complete_checkpoint(results: Any, sweep: Any, long_form: bool) -> None:
    if sweep not in results:
        pytest.skip("make test-faults runs it")
    found = results[sweep]
    print({**found, "problems": len(found["problems"])})  # the figures of the long form: -rP
    assert found["problems"] == []
    assert found["faults"] >= (found["operations"] if long_form else 3)


@pytest.mark.parametrize("sweep", WRONG, ids=" ".join)
def test_these_sweeps_find_a_planted_error(results: Any, sweep: Any) -> None:
    """The negative control."""
    assert any("is not complete" in problem for problem in results[sweep]["problems"]), results[sweep]
