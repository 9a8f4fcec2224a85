"""Processes that a Trainer starts itself: what the launching process has afterwards.

A program of its own starts them, because pytest's process has used torch's threads, and cannot be copied any more.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).with_name("started_program.py")


def run(programs: Any, method: str, path: Path) -> dict[str, Any]:
    done: subprocess.CompletedProcess[str] = programs.run("-W", "error", PROGRAM, method, path, cwd=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = torch.load(path, weights_only=False)  # the program above wrote it
    return found


@pytest.fixture(scope="module")
def forked(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(programs, "fork", tmp_path_factory.mktemp("fork") / "found.pt")


@pytest.fixture(scope="module")
def spawned(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(programs, "spawn", tmp_path_factory.mktemp("spawn") / "found.pt")


@pytest.fixture(params=["forked", "spawned"])
def fitted(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.getfixturevalue(request.param)["fitted"]
    return found


def test_s2_17_weights_come_back_in_the_runs_precision(fitted: dict[str, Any]) -> None:
    assert fitted["dtype"] is torch.float64
    assert fitted["moved"]


def test_both_ways_to_start_train_the_same(forked: dict[str, Any], spawned: dict[str, Any]) -> None:
    assert torch.equal(forked["fitted"]["weights"], spawned["fitted"]["weights"])
    assert forked["fitted"]["metrics"] == spawned["fitted"]["metrics"]


def test_optimizers_come_back_on_the_modules_own_parameters(fitted: dict[str, Any]) -> None:
    assert fitted["steps"] == [10.0, 10.0, 10.0]
    assert fitted["rate"] == [0.0025]


def test_counters_metrics_and_states_come_back(fitted: dict[str, Any]) -> None:
    assert fitted["counters"] == (10, 2, True)
    assert sorted(fitted["metrics"]) == ["loss", "val_loss"]
    assert fitted["logged"] == ["loss", "val_loss"]
    epochs, best_path, best_score, stopper_score = fitted["callbacks"]
    assert epochs == 2
    assert "version_0/checkpoints/epoch=" in best_path
    assert best_score == stopper_score
    assert fitted["loaders"] == 1


def test_t30_the_launching_process_knows_the_folder_that_was_written(fitted: dict[str, Any]) -> None:
    assert fitted["written"]


def test_s2_31_predictions_come_back_in_the_order_of_the_data(fitted: dict[str, Any]) -> None:
    assert torch.equal(fitted["predicted"], (torch.arange(37).float() / 37).double())


def test_s2_31_what_is_validated_is_what_was_trained(forked: dict[str, Any]) -> None:
    """The metrics of the last validation in the fit, and of the best checkpoint, are found again."""
    found = forked["fitted"]
    assert found["validated"][0]["val_loss"] == pytest.approx(found["metrics"]["val_loss"], rel=1e-12)
    assert found["best"][0]["val_loss"] == pytest.approx(found["callbacks"][2], rel=1e-12)


def test_optimizers_are_still_there_after_an_evaluation_in_other_processes(forked: dict[str, Any]) -> None:
    assert forked["fitted"]["optimizers"] == ["Adam"]


def test_the_same_trainer_fits_again(forked: dict[str, Any]) -> None:
    # the callback counts two epochs: the validation of the best checkpoint, of the first, has restored its state
    assert forked["fitted"]["again"] == (15, 2, True)


def test_t26_a_checkpoint_of_the_launching_process_goes_on_exactly(forked: dict[str, Any]) -> None:
    (whole_step, whole), (step, resumed) = forked["resumed"]["after 3"], forked["resumed"]["after 2"]
    assert whole_step == step == 15
    assert torch.equal(whole, resumed)


def test_t26_a_fit_that_ended_inside_an_epoch_is_saved_for_as_many_processes(forked: dict[str, Any]) -> None:
    whole, other = forked["resumed"]["after 3"], forked["resumed"]["after 7 steps"]
    assert whole[0] == other[0] == 15
    assert torch.equal(whole[1], other[1])
    assert forked["resumed"]["ranks in the file"] == 2


def test_t31_a_rank_that_fails_is_the_cause_and_callbacks_hear_of_it_once(forked: dict[str, Any]) -> None:
    failed = forked["failed"]
    places, _, why = failed["error"].partition("\nRank 1 of 2 (process ")  # where the others were comes first
    assert places.startswith("Rank 0 was in the phase 'backward'")
    assert "raised ZeroDivisionError: of rank 1" in why
    assert failed["cause"] == "ZeroDivisionError('of rank 1')"
    assert failed["status"] == "interrupted"
    notes = failed["notes"].splitlines()
    assert notes.count("1 ZeroDivisionError") == 1
    assert not any("LaunchError" in note for note in notes)  # not once more in the launching process


def test_a_scheduler_that_cannot_travel_leaves_its_state(forked: dict[str, Any]) -> None:
    assert forked["lambda"] == 1
