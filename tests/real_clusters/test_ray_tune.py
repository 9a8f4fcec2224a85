"""The recipe of a search with Ray Tune: a bad trial ends early, and one whose actor was killed resumes exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "search_ray.py"
RUN_S = 500
# The recipe with three equal trials, of which the first to reach epoch 3 is killed there, and a bad one.
PROGRAM = """
import os, runpy, signal, sys
from pathlib import Path
from ray import tune

program = runpy.run_path(sys.argv[1])
once = Path(sys.argv[2], "killed")
report = program["Report"].on_train_epoch_end

def kill(self, trainer, pl_module):
    if trainer.current_epoch == 3 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    report(self, trainer, pl_module)

program["Report"].on_train_epoch_end = kill
program["SPACE"].update(width=16, lr=tune.grid_search([0.03, 0.03, 0.03, 1e-4]))
program["main"](Path(sys.argv[2]), 1)
"""


@pytest.mark.timeout(RUN_S + 20)
def test_a_bad_trial_ends_early_and_a_killed_one_resumes_exactly(variables: dict[str, str], tmp_path: Path) -> None:
    for package in ("ray", "pandas", "pyarrow"):  # ray.tune needs the last two
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(RECIPE), str(tmp_path)], env=variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "with {'width': 16, 'lr': 0.03}" in done.stdout
    assert (tmp_path / "killed").exists()

    files = sorted(tmp_path.glob("product/train_*/result.json"), key=lambda path: path.parent.name.split("_")[2])
    trials = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    *good, bad = [[(each["epoch"], each["val_loss"]) for each in trial] for trial in trials]
    assert [epoch for epoch, _ in good[0]] == [0, 1, 2, 3, 4]
    assert good == [good[0]] * 3  # also the one that was killed: no epoch twice, and the same losses
    assert [epoch for epoch, _ in bad] == [0]
    assert len(list(tmp_path.glob("product/train_*/error.txt"))) == 1
