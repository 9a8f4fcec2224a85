"""What a run's folder tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Validated

from drivetrain.callbacks import GoodputMonitor, ModelCheckpoint
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.report.reading import NothingToRead, find, read

Make = Callable[..., Path]


def test_a_folder_of_a_run_its_record_and_a_folder_above_lead_to_it(make_run: Make, tmp_path: Path) -> None:
    folder = make_run("logs/version_0")
    for path in (folder, folder / "run.json", tmp_path, tmp_path / "logs"):
        assert find(str(path)) == (str(folder), 1)


def test_of_several_runs_the_newest_is_taken(make_run: Make, tmp_path: Path) -> None:
    older, newer = make_run("version_1"), make_run("version_0")
    for name in ("run.json", "metrics.csv"):
        os.utime(older / name, (1, 1))
    assert find(str(tmp_path)) == (str(newer), 2)


def test_a_newer_folder_without_a_record_as_predict_leaves_it_is_passed_over(make_run: Make, tmp_path: Path) -> None:
    older, newer = make_run("version_0"), make_run("version_1")
    for name in ("run.json", "metrics.csv"):
        os.utime(older / name, (1, 1))
    (newer / "run.json").unlink()
    assert find(str(tmp_path)) == (str(older), 2)
    (older / "run.json").unlink()
    assert find(str(tmp_path)) == (str(newer), 2)


def test_where_there_is_no_run_the_error_tells_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(NothingToRead, match="gone does not exist. Pass the log folder of a run"):
        find(str(tmp_path / "gone"))
    with pytest.raises(NothingToRead, match='has no run in it.*logger="csv"'):
        find(str(tmp_path))
    with pytest.raises(NothingToRead, match="is an address. Copy the folder"):
        find("s3://bucket/run")


def test_a_named_pipe_is_not_waited_for(make_run: Make, tmp_path: Path, programs: Any) -> None:
    folder = make_run()
    for name in ("run.json", "hparams.yaml"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    os.mkfifo(tmp_path / "run.json")
    done = programs.run("-m", "drivetrain.cli.command", "report", folder, "--json", cwd=tmp_path, timeout=60)
    assert "run.json is not a file" in done.stdout
    done = programs.run("-m", "drivetrain.cli.command", "report", tmp_path / "run.json", cwd=tmp_path, timeout=60)
    assert "run.json is no run.json" in done.stderr


def test_values_are_read_from_the_table(make_run: Make) -> None:
    run = read(str(make_run()))
    assert run.curves == {"train_loss": [(0, 4), (10, 3), (20, 2), (30, 1)], "val_loss": [(0, 5), (30, 3)]}
    assert run.notes == []


def test_a_table_with_lines_that_were_cut_is_read_without_them(make_run: Make) -> None:
    folder = make_run()
    with (folder / "metrics.csv").open("a") as table:
        table.write("40,0.5,1,2,3\nnonsense,1\n50,abc,1\n")
    assert read(str(folder)).curves["train_loss"][-1] == (40, 0.5)


def fitted(make_trainer: Any, data: Any, logger: Any, *callbacks: Any) -> Path:
    from torch.utils.data import DataLoader

    trainer = make_trainer(logger=logger, callbacks=[*callbacks], enable_checkpointing=True)
    trainer.fit(Validated(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=16))
    return Path(logger.log_dir)


@pytest.mark.parametrize("metrics", [{}, {"hp_metric": 0.5}])
def test_the_placeholder_of_tensorboards_page_of_hyperparameters_is_no_value(
    make_trainer: Any, data: Any, tmp_path: Path, metrics: dict[str, float]
) -> None:
    logger = TensorBoardLogger(tmp_path, "", "run")
    logger.log_hyperparams({"lr": 0.1}, metrics or None)
    curves = read(str(fitted(make_trainer, data, logger))).curves
    assert "val_loss" in curves
    assert ("hp_metric" in curves) == bool(metrics)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_values_record_and_ledger_of_a_fit_are_read(make_trainer: Any, data: Any, tmp_path: Path, kind: Any) -> None:
    folder = fitted(make_trainer, data, kind(tmp_path, "", "run"), ModelCheckpoint(), GoodputMonitor())
    run = read(str(folder))
    assert [step for step, _ in run.curves["val_loss"]] == [3]
    assert run.last["status"] == "finished"
    assert run.step_s == pytest.approx(run.last["seconds"] / 4)
    assert run.goodput is not None
    assert run.goodput["runs"] == 1
    assert run.notes == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_second_graph_in_event_files_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        logger = TensorBoardLogger(tmp_path, "", "run", log_graph=True)
        logger.log_graph(torch.nn.Linear(2, 1), torch.zeros(1, 2))
        logger.log_metrics({"loss": 0.5}, 3)
        logger.save()
    assert read(str(tmp_path / "run")).curves["loss"] == [(3.0, 0.5)]
    assert "more than one graph" not in caplog.text


def test_event_files_without_tensorboard_are_a_note(
    make_trainer: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fitted(make_trainer, data, TensorBoardLogger(tmp_path, "", "run"))
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert read(str(folder)).notes == [
        "The values are in TensorBoard's event files. To see them, pip install tensorboard."
    ]


def test_a_run_without_values_or_record_tells_what_writes_them(make_run: Make) -> None:
    folder = make_run(rows={})
    assert 'pass Trainer(logger="csv")' in read(str(folder)).notes[0]
    (folder / "run.json").unlink()
    assert read(str(folder)).notes[0].startswith("There is no run.json")
    (folder / "run.json").write_text("{")
    assert read(str(folder)).notes[0].startswith("run.json cannot be read")


def test_the_time_of_a_step_is_that_of_all_fits_that_have_ended(make_run: Make) -> None:
    resumed = {"first_step": 1000, "last_step": 1500, "seconds": 25.0}
    killed = {"status": "running", "first_step": 1500, "last_step": None, "seconds": None}
    assert read(str(make_run("run", {}, resumed, killed))).step_s == pytest.approx(125 / 1500)
    assert read(str(make_run("other", killed))).step_s is None
