"""The record of a run in its log folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import Ready, Validated, regression_data
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger
from drivetrain.report import record, run_file


def attempts(folder: Path) -> list[dict[str, Any]]:
    return run_file.load(folder / "run.json")["attempts"]


@pytest.fixture
def fit(make_trainer: Any, data: Any, tmp_path: Path) -> Any:
    """Fit with four batches an epoch into the folder ``run``."""

    def fit(*callbacks: Callback, resume: str | None = None, module: Any = None, **arguments: Any) -> Any:
        given = {"logger": CSVLogger(tmp_path, "", "run"), **arguments}
        trainer = make_trainer(callbacks=[*callbacks], **given)
        loaders = DataLoader(data, batch_size=8), DataLoader(data, batch_size=16)
        trainer.fit(module or Validated(), *loaders, ckpt_path=resume)
        return trainer

    return fit


def test_a_fit_leaves_plan_settings_environment_checkpoint_and_reason(fit: Any, tmp_path: Path) -> None:
    fit(ModelCheckpoint(monitor="val_loss"), enable_checkpointing=True, gradient_clip_val=0.5)
    (found,) = attempts(tmp_path / "run")
    assert (found["status"], found["why"]) == ("finished", "max_epochs=1 is reached")
    assert (found["first_step"], found["last_step"], found["epochs"]) == (0, 4, 1)
    assert 0 < found["seconds"] <= found["ended"] - found["began"] + 1
    assert {"what": "strategy", "choice": "SingleDeviceStrategy", "why": "there is one device"} in found["plan"]
    assert found["settings"]["gradient_clip_val"] == "0.5"
    assert "max_steps" not in found["settings"]
    assert found["environment"]["processes"] == 1
    (saved,) = found["checkpoints"]
    assert saved["best"] == "checkpoints/epoch=0-step=4.ckpt", "relative, so that the folder may be moved"
    assert list(saved["kept"].items()) == [(saved["best"], saved["score"])]


def test_a_resumed_fit_adds_an_attempt(fit: Any, tmp_path: Path) -> None:
    trainer = fit(ModelCheckpoint(), enable_checkpointing=True)
    best = trainer.checkpoint_callback.best_model_path
    fit(ModelCheckpoint(), resume=best, max_epochs=2, enable_checkpointing=True)
    first, second = attempts(tmp_path / "run")
    assert (first["resumed_from"], second["resumed_from"]) == (None, "checkpoints/epoch=0-step=4.ckpt")
    assert (second["first_step"], second["last_step"]) == (4, 8)


class Raises(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [(ValueError("no such row"), "failed", "ValueError: no such row"), (SystemExit(), "stopped", "SystemExit")],
)
def test_the_record_of_a_fit_that_raises_has_the_exception(
    fit: Any, tmp_path: Path, error: BaseException, status: str, why: str
) -> None:
    with pytest.raises(type(error)):
        fit(Raises(error))
    (found,) = attempts(tmp_path / "run")
    assert (found["status"], found["why"], found["last_step"]) == (status, why, 1)


def test_a_fit_that_is_killed_leaves_its_beginning(fit: Any, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Looks(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            for thread in threading.enumerate():
                if thread.name == "drivetrain record":
                    thread.join()
            seen.extend(attempts(tmp_path / "run"))

    fit(Looks(), limit_train_batches=1)
    assert seen[0]["status"] == "running"
    assert seen[0]["code"]
    assert "ended" not in seen[0]


def test_the_checkpoint_of_a_fit_that_is_asked_to_end_is_listed(fit: Any, tmp_path: Path) -> None:
    class Asks(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(Asks(), enable_checkpointing=True)
    (found,) = attempts(tmp_path / "run")
    assert found["status"] == "stopped"
    assert [each["last"] for each in found["checkpoints"]] == [None, "checkpoints/stopped.ckpt"]
    fit(enable_checkpointing=True, max_epochs=1)
    assert len(attempts(tmp_path / "run")[-1]["checkpoints"]) == 1


RANK_1_RAISES = """
import sys
import torch
from drivetrain import LightningModule, Trainer
from drivetrain.loggers import CSVLogger

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if self.global_rank == int(sys.argv[1]) and batch_idx == 1:
            raise ValueError("no such row")
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_fork", logger=CSVLogger(".", "", "run"),
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=2))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_record_has_the_error_of_any_rank_that_was_started(programs: Any, tmp_path: Path, rank: int) -> None:
    """When rank 1 raises, the launcher kills rank 0, which writes the record."""
    program = tmp_path / "program.py"
    program.write_text(RANK_1_RAISES)
    done = programs.run(program, rank, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (found,) = attempts(tmp_path / "run")
    assert (found["status"], found["why"]) == ("failed", "ValueError: no such row")
    assert found["seconds"] > 0


def test_an_error_before_the_ranks_start_leaves_the_record_of_the_fit_before(fit: Any, tmp_path: Path) -> None:
    trainer = fit()
    before = attempts(tmp_path / "run")
    launcher = SimpleNamespace(is_external=False)
    parts = {"loggers": trainer.loggers, "engine": SimpleNamespace(launcher=launcher), "_launch": "other"}
    starting: Any = type("Starting", (), parts)()
    record.end(starting, ValueError("no such data"))
    assert attempts(tmp_path / "run") == before
    starting._launch = before[-1]["launch"] = "same"
    (tmp_path / "run" / "run.json").write_text(json.dumps({"schema": 1, "diffs": {}, "attempts": before}))
    record.end(starting, ValueError("no such data"))
    assert attempts(tmp_path / "run")[-1]["why"] == "ValueError: no such data"


def test_a_logger_without_a_record_or_without_a_folder_writes_none(fit: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "", "run")
    logger.keeps_run_record = False
    fit(logger=logger)
    fit(logger=False)
    fit(fast_dev_run=True)
    assert [*tmp_path.rglob("run.json")] == []
    fit()
    assert len([*tmp_path.rglob("run.json")]) == 1


def test_an_evaluation_adds_no_attempt(fit: Any, tmp_path: Path) -> None:
    trainer = fit()
    trainer.validate(Validated(), Ready([regression_data()[:8]]), verbose=False)
    assert len(attempts(tmp_path / "run")) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"epochs": 3}', '{"schema": 99, "attempts": [], "diffs": {}}'])
def test_a_file_that_is_no_record_of_this_layout_is_kept_and_the_fit_warns(
    fit: Any, tmp_path: Path, content: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(content)
    with pytest.warns(UserWarning, match=r"run\.json in .*/run, could not be written.*keeps_run_record = False"):
        trainer = fit()
    assert (trainer.global_step, (tmp_path / "run" / "run.json").read_text()) == (4, content)


def test_the_warning_has_the_reason_once(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"could not be written") as warned:
        fit()
    (text,) = [str(each.message) for each in warned if "run.json" in str(each.message)]
    assert text.count("EISDIR") == 1


def test_a_failure_inside_the_record_does_not_end_the_fit(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_environment", lambda trainer: 1 / 0)
    with pytest.warns(UserWarning, match="could not be written: division by zero"):
        assert fit().global_step == 4


def test_the_record_has_no_environment_variable_and_no_command_line(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "topsecret1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--key=topsecret2"])
    fit()
    assert "topsecret" not in (tmp_path / "run" / "run.json").read_text()


def test_a_score_that_is_no_number_is_text_that_every_json_reader_accepts(fit: Any, tmp_path: Path) -> None:
    class Nan(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float("nan"))

    with pytest.warns(UserWarning, match="logged as nan"):
        fit(ModelCheckpoint(monitor="val_loss"), enable_checkpointing=True, module=Nan())
    text = (tmp_path / "run" / "run.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found["attempts"][0]["checkpoints"][0]["score"] == "inf"


# ---- two fits at the same time ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is not known")
@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True), ({"status": "finished"}, False), ({"environment": {"host": "another"}}, False),
        ({"process": [0, 1]}, False), ({"process": None}, False),
    ],
    ids=["it runs", "it has ended", "on another machine", "its number is another process's now", "of an older version"],
)  # fmt: skip
def test_a_process_that_writes_into_the_same_folder_is_named(
    fit: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder, change: dict[str, Any], is_told: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        fit()
        path = tmp_path / "run" / "run.json"
        found = run_file.load(path)
        running = {**found["attempts"][0], "id": "other", "status": "running", "process": record._process(other.pid)}
        if change.get("process"):
            change = {"process": [other.pid, record._process(other.pid)[1] + change["process"][1]]}
        found["attempts"] = [{**running, **change}]
        path.write_text(json.dumps(found))
        fit()
        other.communicate(b"\n")
    told = [str(each.message) for each in recwarn if "the same log folder" in str(each.message)]
    assert len(told) == is_told
    assert all(f"The process {other.pid} writes" in each and str(tmp_path / "run") in each for each in told)
    assert len(attempts(tmp_path / "run")) == 2
