"""What a run's folder tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Validated
from torch.utils.data import DataLoader

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


# ---- a run that continues another one --------------------------------------------------------------------------------


def test_a_resumed_run_begins_with_the_fits_and_the_values_of_the_run_that_it_continues(make_run: Make) -> None:
    first = make_run("version_0", {"last_step": 25, "status": "running"})
    source = {"resumed_from": str(first / "checkpoints" / "b.ckpt"), "first_step": 15, "last_step": 45}
    second = make_run("version_1", source, rows={"train_loss": ["", "", 9.0, 8.0], "new": ["", "", "", 7.0]})
    again = {"resumed_from": str(second / "checkpoints" / "last"), "first_step": 30, "last_step": 60}
    third = make_run("version_2", again, rows={"train_loss": ["", "", "", 5.0]})
    run = read(str(third))
    assert run.curves["train_loss"] == [(0, 4), (10, 3), (20, 9), (30, 5)]  # step 20 as it was after the resumption
    assert run.curves["val_loss"] == [(0, 5)]
    assert [each["first_step"] for each in run.attempts] == [0, 15, 30]
    assert run.last["first_step"] == 30
    assert run.step_s == 300 / (25 + 30 + 30)
    assert run.notes == [
        "The steps before 30 are those of ../version_1.", "The steps before 15 are those of ../version_0.",
    ]  # fmt: skip
    alone = read(str(third), continues=False)
    assert (alone.curves["train_loss"], len(alone.attempts)) == ([(30, 5)], 1)


def test_the_run_of_a_checkpoint_in_another_folder_is_the_newest_older_one_that_names_it(make_run: Make) -> None:
    shared = "/data/checkpoints/last.ckpt"
    saved = {"checkpoints": [{"monitor": None, "best": None, "score": None, "last": shared, "kept": {}}]}
    make_run("version_0", {"began": 100.0, **saved}, rows={"train_loss": [1.0]})
    make_run("version_1", {"began": 200.0, **saved}, rows={"train_loss": [2.0]})
    run = make_run("version_2", {"began": 300.0, "resumed_from": shared, "first_step": 1000}, rows={"val_loss": [3.0]})
    make_run("version_3", {"began": 400.0, **saved}, rows={"train_loss": [4.0]})
    make_run("other", {"began": 250.0}, rows={"train_loss": [5.0]})
    assert read(str(run)).notes[0] == "The steps before 1000 are those of ../version_1."


@pytest.mark.parametrize("source", ["/gone/version_0/checkpoints/a.ckpt", "s3://bucket/a.ckpt"])
def test_a_resumed_run_without_the_run_before_says_where_it_begins(make_run: Make, source: str) -> None:
    run = read(str(make_run("version_1", {"resumed_from": source, "first_step": 300})))
    assert run.notes == [
        f"This training resumed at step 300 from {source}, and no record of the run before is found, so what is shown "
        "begins there."
    ]
    assert len(run.attempts) == 1


def test_a_fit_that_resumes_in_its_own_folder_continues_no_other(make_run: Make) -> None:
    run = read(str(make_run("run", {}, {"resumed_from": "checkpoints/b.ckpt", "first_step": 500})))
    assert (len(run.attempts), run.notes) == (2, [])


def test_two_real_fits_are_one_training(make_trainer: Any, data: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", name="")
    checkpoint = ModelCheckpoint(save_last=True)
    first = fitted(make_trainer, data, logger, checkpoint)
    trainer = make_trainer(max_epochs=2, logger=CSVLogger(tmp_path / "logs", name=""), enable_checkpointing=True)
    trainer.fit(Validated(), DataLoader(data, 8), DataLoader(data, 8), ckpt_path=checkpoint.last_model_path)
    assert Path(trainer.log_dir) != first
    run = read(trainer.log_dir)
    assert [each["first_step"] for each in run.attempts] == [0, 4]
    assert [step for step, _ in run.curves["val_loss"]] == [3, 7]
