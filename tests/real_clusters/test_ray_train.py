"""Ray Train's strategies for Lightning, in its workers, through the suite for strategies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing.strategy_conformance import StrategyConformance

PROGRAM = Path(__file__).with_name("ray_train_program.py")
RUN_S = 500


@pytest.mark.timeout(RUN_S + 20)
@pytest.mark.parametrize("strategy", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_a_strategy_of_ray_trains_passes_the_suite(strategy: str, variables: dict[str, str], tmp_path: Path) -> None:
    for package in ("ray", "pandas", "pyarrow"):  # ray.train needs the last two
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.compat", str(PROGRAM), str(tmp_path), strategy], env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = {path.name: path.read_text() for path in tmp_path.glob("test_*.txt")}
    rows = [name for name in vars(StrategyConformance) if name.startswith("test_")]
    assert sorted(found) == sorted(f"{row}.{rank}.txt" for row in rows for rank in (0, 1))
    assert {name: text for name, text in found.items() if text != "ok"} == {}
