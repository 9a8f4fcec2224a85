"""Processes that an accelerator of the 1.1 generation starts: what the launching process has afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("started_program.py")
LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"


def found_in(output: str) -> dict[str, Any]:
    line = next(each for each in output.splitlines() if each.startswith("found "))
    found: dict[str, Any] = json.loads(line.partition(" ")[2])
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"][0] == pytest.approx(expected["weights"][0], rel=1e-5)
    assert found["results"][0] == pytest.approx(expected["results"][0], rel=1e-5)
    assert found["steps"] == expected["steps"] == 8


def test_s3_18_weights_and_results_come_back(programs: Any, tmp_path: Path) -> None:
    done = programs.run("-W", "error", "-W", "ignore::FutureWarning", PROGRAM, "fork", "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = found_in(done.stdout)
    check(found["fork"], found["alone"])


@pytest.mark.skipif(not LONG, reason="starts several Pythons: make test-faults")
@pytest.mark.parametrize("kind", ["spawn", "ddp_spawn", "ddp"])
def test_s3_15_and_s3_20_each_way_of_starting_trains_alike(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", str(PROGRAM)]
    outputs = []
    for each in (kind, "alone"):
        done = subprocess.run([*command, each], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(found_in(done.stdout)[each])
    check(*outputs)


@pytest.mark.skipif(not LONG, reason="starts torchrun: make test-faults")
def test_s3_19_under_torchrun_with_a_cluster_of_ones_own(tmp_path: Path) -> None:
    """E3-2: with the class that the guide prints, on two ranks."""
    from tests.legacy.v1_1 import test_served

    program = tmp_path / "train.py"
    program.write_text(test_served.PROGRAM, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max_epochs", "2", "--progress_bar_refresh_rate", "0"]
    done = subprocess.run(
        [*torchrun, "-m", "drivetrain.compat", "--generation", "1.1", str(program), *options],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained with 1.1.0 for 2 epochs") == 2
