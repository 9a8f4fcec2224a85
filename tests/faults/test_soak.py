"""A training that is killed again and again: its state stays right, and its ledger knows where the time went."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.loops.goodput import Report, account, read

PROGRAM = Path(__file__).with_name("soak_program.py")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork, SIGKILL, pidfd and /proc"),
    pytest.mark.timeout(3600),  # the long form takes minutes
]


def soaked(programs: Any, *trainings: tuple[Path, int, float, int, int], width: int = 32) -> list[dict[str, Any]]:
    """Run trainings, each a folder, steps, mean seconds between kills, their number and a seed; return the results."""
    for folder, *_ in trainings:
        folder.mkdir()
    words = [word for each in trainings for word in each]
    environ = {**os.environ, "SOAK_WIDTH": str(width)}
    done = programs.run(PROGRAM, *words, cwd=trainings[0][0], env=environ, timeout=1500)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["steps"] for each in results] == [steps for _, steps, *_ in trainings]
    print(results)
    return results


def ledger_of(folder: Path, killed: dict[str, Any]) -> Report:
    report = account(*read(folder / "ledger.jsonl"))
    print(report.line())
    assert sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=1e-4)
    assert 1 <= report.runs <= killed["kills"] + 1  # it has none that was killed before its first record
    assert report.runs - 1 == report.failures
    assert (report.open, report.overlaps) == (False, 0)
    return report


def test_killed_at_random_it_ends_with_the_weights_of_a_run_that_was_not(
    programs: Any, tmp_path: Path, long_form: bool, seed: int
) -> None:
    """The long form is a soak of minutes with a kill each five seconds on average."""
    steps, mean_s, kills = (20_000, 5.0, 10**6) if long_form else (2000, -0.1, 3)
    killed, whole = soaked(
        programs, (tmp_path / "killed", steps, mean_s, kills, seed), (tmp_path / "whole", steps, 1.0, 0, 1)
    )
    assert killed["kills"] > 0
    assert killed["weights"] == whole["weights"]
    report = ledger_of(tmp_path / "killed", killed)
    assert report.seconds["lost"] + report.seconds["idle"] > 0
    undisturbed = account(*read(tmp_path / "whole" / "ledger.jsonl"))
    assert undisturbed.seconds["lost"] == undisturbed.seconds["idle"] == 0


def test_at_a_mean_of_30_s_between_kills_four_fifths_of_the_time_are_steps_that_count(
    programs: Any, tmp_path: Path, long_form: bool, seed: int
) -> None:
    if not long_form:
        pytest.skip("takes minutes")
    (killed,) = soaked(programs, (tmp_path / "killed", 40_000, 30.0, 10**6, seed), width=2048)
    report = ledger_of(tmp_path / "killed", killed)
    assert report.wall_s == pytest.approx(killed["wall_s"], rel=0.01)
    assert report.goodput >= 0.8


def test_in_20_000_steps_memory_descriptors_and_threads_do_not_grow(
    programs: Any, tmp_path: Path, long_form: bool
) -> None:
    if not long_form:
        pytest.skip("takes a minute")
    (result,) = soaked(programs, (tmp_path / "whole", 20_000, 1.0, 0, 1))
    (memory_before, *before), (memory, *after) = result["used"]
    assert memory - memory_before <= 4 << 10  # KiB
    assert after == before
