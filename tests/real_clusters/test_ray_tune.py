"""The recipe of a search with Ray Tune: bad trials end early, killed ones resume exactly, a killed search continues."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "search_ray.py"
RUN_S = 500
# The recipe with three equal trials, of which the first to reach epoch 3 kills its actor or the search, and a bad one.
PROGRAM = """
import os, runpy, signal, sys
from pathlib import Path
from ray import tune

program = runpy.run_path(sys.argv[1])
once, search = Path(sys.argv[2], "killed"), os.getpid() if sys.argv[3:] else None
report = program["Report"].on_train_epoch_end

def kill(self, trainer, pl_module):
    if trainer.current_epoch == 3 and not once.exists():
        once.touch()
        os.kill(search or os.getpid(), signal.SIGKILL)
    report(self, trainer, pl_module)

program["Report"].on_train_epoch_end = kill
program["SPACE"].update(width=16, lr=tune.grid_search([0.03, 0.03, 0.03, 1e-4]))
program["main"](Path(sys.argv[2]), 1)
"""


pytestmark = pytest.mark.timeout(2 * RUN_S + 20)


@pytest.fixture(autouse=True)
def _needs() -> None:
    for package in ("ray", "pandas", "pyarrow"):  # ray.tune needs the last two
        pytest.importorskip(package)


def run(variables: dict[str, str], *words: object) -> tuple[int, str]:
    """Run the program: its exit code, and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(RECIPE), *map(str, words)], env=variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def reported(folder: Path) -> list[list[tuple[int, float]]]:
    """The epochs and losses that each trial has reported."""
    files = sorted(folder.glob("product/train_*/result.json"), key=lambda path: path.parent.name.split("_")[2])
    trials = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    return [[(each["epoch"], each["val_loss"]) for each in trial] for trial in trials]


def test_a_bad_trial_ends_early_and_a_killed_one_resumes_exactly(variables: dict[str, str], tmp_path: Path) -> None:
    code, text = run(variables, tmp_path)
    assert code == 0, text
    assert "with {'width': 16, 'lr': 0.03}" in text
    assert (tmp_path / "killed").exists()
    *good, bad = reported(tmp_path)
    assert [epoch for epoch, _ in good[0]] == [0, 1, 2, 3, 4]
    assert good == [good[0]] * 3  # also the one that was killed: no epoch twice, and the same losses
    assert [epoch for epoch, _ in bad] == [0]
    assert len(list(tmp_path.glob("product/train_*/error.txt"))) == 1


def test_a_search_that_was_killed_continues(variables: dict[str, str], tmp_path: Path) -> None:
    code, text = run(variables, tmp_path, "the search")
    assert code == -signal.SIGKILL, text
    assert "Best loss" not in text
    code, text = run(variables, tmp_path)
    assert code == 0, text
    assert "with {'width': 16, 'lr': 0.03}" in text
    *good, bad = (trial[-1] for trial in reported(tmp_path))
    assert good == [good[0]] * 3
    assert good[0][0] == 4
    assert bad[1] > good[0][1]
