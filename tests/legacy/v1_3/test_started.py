"""Processes that an accelerator of the 1.3 generation starts: what the launching process has afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("started_program.py")


def test_s2_17_and_s2_31_weights_and_results_come_back(programs: Any, tmp_path: Path) -> None:
    done = programs.run("-W", "error", "-W", "ignore::FutureWarning", PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [each for each in done.stdout.splitlines() if each.startswith("found ")]
    started, alone = json.loads(line.partition(" ")[2])
    assert started["weights"][0] == pytest.approx(alone["weights"][0], rel=1e-5)
    assert started["results"][0] == pytest.approx(alone["results"][0], rel=1e-5)
    assert started["kept"] == started["results"]
    assert started["steps"] == alone["steps"] == 8
