"""The recipe of a search with Optuna runs as it stands, prunes a bad trial, and resumes a trial that was killed."""

from __future__ import annotations

import logging
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # of heartbeats

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "search_optuna.py"
GOOD, BAD = {"width": 16, "lr": 0.03}, {"width": 4, "lr": 1e-4}
KILLED = """
import os, runpy, signal, sys
from pathlib import Path

program = runpy.run_path(sys.argv[1])
report = program["Pruning"].on_train_epoch_end

def kill(self, trainer, pl_module):
    report(self, trainer, pl_module)
    if trainer.current_epoch == 3:
        os.kill(os.getpid(), int(sys.argv[3]))

program["Pruning"].on_train_epoch_end = kill
program["main"](Path(sys.argv[2]), 1)
"""


@pytest.fixture(autouse=True)
def _loud_again() -> Iterator[None]:
    """The recipe makes drivetrain's logger quiet for its process."""
    logger = logging.getLogger("drivetrain")
    level = logger.level
    yield
    logger.setLevel(level)


def queue(folder: Path, *parameters: dict[str, Any]) -> None:
    """Make the study of the recipe, whose first trials have these parameters."""
    study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="product")
    for each in parameters:
        study.enqueue_trial(each)


def search(folder: Path, trials: int) -> list[Any]:
    """Run the recipe in this process; return the trials of the study."""
    runpy.run_path(str(RECIPE))["main"](folder, trials)
    found: list[Any] = optuna.load_study(storage=f"sqlite:///{folder}/study.db", study_name="product").trials
    return found


def test_a_bad_trial_is_pruned_and_a_good_one_is_found(tmp_path: Path, capsys: Any) -> None:
    queue(tmp_path, *[GOOD] * 3, BAD)
    *good, bad = search(tmp_path, 4)
    assert [trial.state.name for trial in good] == ["COMPLETE"] * 3
    assert [list(trial.intermediate_values) for trial in good] == [[0, 1, 2, 3, 4]] * 3
    assert len({trial.value for trial in good}) == 1  # equal parameters, equal numbers
    assert bad.state.name == "PRUNED"
    assert len(bad.intermediate_values) < 5
    assert (tmp_path / "trial_3" / "last.ckpt").exists()
    assert f"in {tmp_path}/trial_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "code", "repeated"),
    [(signal.SIGKILL, -signal.SIGKILL, [3, 4]), (signal.SIGTERM, 143, [4])],
    ids=["SIGKILL", "SIGTERM"],
)
def test_a_trial_that_was_killed_resumes_from_its_checkpoint(
    tmp_path: Path, number: signal.Signals, code: int, repeated: list[int]
) -> None:
    """After SIGKILL, epoch 3 is trained again; after SIGTERM nothing is, because the fit saves before it ends."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        queue(folder, GOOD)
    [undisturbed] = search(whole, 1)

    command = [sys.executable, "-c", KILLED, str(RECIPE), str(cut), str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    with sqlite3.connect(cut / "study.db") as study:  # instead of waiting until the trial counts as stale
        study.execute("UPDATE trial_heartbeats SET heartbeat = '2026-01-01 00:00:00'")
    study.close()

    killed, resumed = search(cut, 1)
    assert (killed.state.name, list(killed.intermediate_values)) == ("FAIL", [0, 1, 2, 3])
    assert resumed.params == GOOD
    assert list(resumed.intermediate_values) == repeated
    assert resumed.value == undisturbed.value
    assert resumed.intermediate_values[4] == undisturbed.intermediate_values[4]


LIGHTNING = """
import lightning.pytorch as pl
import optuna, torch
from optuna_integration import PyTorchLightningPruningCallback
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(4, 1), lr

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

def objective(trial):
    pl.seed_everything(0)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    pruning = PyTorchLightningPruningCallback(trial, "val_loss")
    trainer = pl.Trainer(max_epochs=3, callbacks=pruning, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(Net(trial.suggest_float("lr", 1e-4, 1e-1)), loader, loader)
    return trainer.callback_metrics["val_loss"].item()

study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
for lr in (0.1, 0.1, 1e-4):
    study.enqueue_trial({"lr": lr})
study.optimize(objective, n_trials=3)
print([(trial.state.name, list(trial.intermediate_values)) for trial in study.trials], Net.__mro__[1].__module__)
"""


def test_the_callback_for_lightning_works_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("optuna_integration")
    (tmp_path / "program.py").write_text(LIGHTNING)
    command = [sys.executable, "-m", "drivetrain.compat", "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    whole = ("COMPLETE", [0, 1, 2])
    assert ended.stdout.splitlines()[-1] == f"{[whole, whole, ('PRUNED', [0])]} drivetrain.module.module"
