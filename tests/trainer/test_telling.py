"""Loggers that fail, and runs that a resumed fit continues."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.base import files
from drivetrain.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, Logger, TensorBoardLogger


class Net(LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)


def trainer(folder: Path, logger: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "log_every_n_steps": 1, "default_root_dir": folder, "callbacks": [ModelCheckpoint(folder / "saved")],
    }  # fmt: skip
    return Trainer(logger=logger, **{**quiet, **arguments})


class Recording(Logger):
    """Keeps its rows; one of its methods may fail."""

    name = "recording"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.rows: list[int | None] = []
        self.fails, self.error = fails, error or OSError(errno.ENOSPC, "No space left on device")
        self.failures = 0

    def _maybe(self, method: str) -> None:
        if method == self.fails:
            self.failures += 1
            raise self.error

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._maybe("log_metrics")
        self.rows.append(step)

    def log_hyperparams(self, params: Any = None) -> None:
        self._maybe("log_hyperparams")

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self._maybe("log_graph")

    def save(self) -> None:
        self._maybe("save")

    def finalize(self, status: str) -> None:
        self._maybe("finalize")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._maybe("after_save_checkpoint")


METHODS = ["log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint"]


@pytest.mark.parametrize("method", METHODS)
def test_one_failure_of_a_logger_never_ends_a_fit_and_warns_once(method: str, tmp_path: Path) -> None:
    fails, works = Recording(method), Recording()
    run = trainer(tmp_path, [fails, works], max_epochs=2)
    with pytest.warns(UserWarning, match=rf"Recording.{method} failed.*No space left on device") as warned:
        run.fit(Net(), loader())
    assert len(warned) == 1
    assert fails.failures >= 1
    assert run.global_step == 8
    assert works.rows.count(7) == 2  # the last step and its epoch: other loggers miss nothing
    assert (tmp_path / "saved" / "epoch=1-step=8.ckpt").exists()


def test_callbacks_that_log_go_on_too(tmp_path: Path) -> None:
    monitors = [LearningRateMonitor("step"), DeviceStatsMonitor()]
    run = trainer(tmp_path, Recording("log_metrics"), callbacks=monitors, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="log_metrics failed") as warned:
        run.fit(Net(), loader())
    assert len(warned) == 1
    assert run.global_step == 4


def test_an_interruption_ends_the_fit(tmp_path: Path) -> None:
    """Negative control: what is no failure of the logger is not swallowed."""
    with pytest.raises(SystemExit):
        trainer(tmp_path, Recording("log_metrics", KeyboardInterrupt())).fit(Net(), loader())


def test_what_must_be_corrected_is_an_error_before_training(tmp_path: Path) -> None:
    run = trainer(tmp_path, Recording("log_hyperparams", ConfigurationError("wrong key")))
    with pytest.raises(ConfigurationError, match="wrong key"):
        run.fit(Net(), loader())
    assert run.global_step == 0
    later = trainer(tmp_path, Recording("log_metrics", ConfigurationError("wrong key")))
    with pytest.warns(UserWarning, match="wrong key"):
        later.fit(Net(), loader())
    assert later.global_step == 4


def test_a_full_disk_does_not_end_a_fit_with_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    write = files.write

    def full(path: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fspath(path).endswith("metrics.csv"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(files, "write", full)
    run = trainer(tmp_path, logger)
    with pytest.warns(UserWarning, match="CSVLogger.log_metrics failed.*No space left") as warned:
        run.fit(Net(), loader())
    assert (len(warned), run.global_step) == (1, 4)
    monkeypatch.setattr(files, "write", write)
    logger.save()  # there is space again: the rows were kept
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().count("\n") == 5


def test_a_full_disk_does_not_end_a_fit_with_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    run = trainer(tmp_path, TensorBoardLogger(tmp_path))
    with pytest.warns(UserWarning, match="TensorBoardLogger.*failed.*No space left") as warned:
        run.fit(Net(), loader())
    assert (len(warned), run.global_step) == (1, 4)


# ---- runs that a resumed fit continues -------------------------------------------------------------------------------


class Service(Recording):
    """Gives runs numbers."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.run_id: int | None = None

    @property
    def version(self) -> str | None:  # type: ignore[override]
        return None if self.run_id is None else f"run{self.run_id}"

    @property
    def is_undecided(self) -> bool:
        return self.run_id is None

    def begin_run(self) -> None:
        if self.run_id is None:
            Service.runs += 1
            self.run_id = Service.runs

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run_id = int(state["run_id"])


def test_a_resumed_fit_continues_the_runs_of_its_loggers(tmp_path: Path) -> None:
    first, second = [Service(), Service()], [Service(), Service()]
    saves, again = ModelCheckpoint(save_last=True), ModelCheckpoint(save_last=True)
    trainer(tmp_path, first, callbacks=[saves]).fit(Net(), loader())
    assert first[0].run_id != first[1].run_id
    assert f"run{first[0].run_id}" in saves.last_model_path
    trainer(tmp_path, second, max_epochs=2, callbacks=[again]).fit(Net(), loader(), ckpt_path=saves.last_model_path)
    assert [each.run_id for each in second] == [each.run_id for each in first]
    assert Path(again.best_model_path).parent == Path(saves.best_model_path).parent
    third = Service()
    trainer(tmp_path, third).fit(Net(), loader())
    assert third.run_id == Service.runs > (second[1].run_id or 0)


def test_a_checkpoint_of_loggers_without_a_run_has_no_entry(tmp_path: Path) -> None:
    for logger, has_entry in ((Recording(), False), (CSVLogger(tmp_path), True)):
        trainer(tmp_path, logger).fit(Net(), loader())
        saved = torch.load(tmp_path / "saved" / "epoch=0-step=4.ckpt", weights_only=True)
        assert ("loggers" in saved) == has_entry
        (tmp_path / "saved" / "epoch=0-step=4.ckpt").unlink()


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.current_epoch == 1 and batch_idx == 1:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


def test_a_table_has_each_step_once_if_a_fit_resumes_before_its_last_row(tmp_path: Path) -> None:
    def fit(model: Net, path: Path | None = None) -> list[dict[str, str]]:
        logger = CSVLogger(tmp_path, version="run")
        trainer(tmp_path, logger, max_epochs=3).fit(model, loader(), ckpt_path=path)
        return list(csv.DictReader(Path(logger.metrics_file_path).read_text().splitlines()))

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails())
    rows = fit(Net(), tmp_path / "saved" / "epoch=0-step=4.ckpt")
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert [int(row["step"]) for row in rows if row["loss_epoch"]] == [3, 7, 11]


def saved_by_each_rank_alone(folder: Path) -> None:
    """After a failure, each rank saves without the other."""
    run = trainer(folder, Service(), devices=2, strategy="ddp", max_epochs=2, callbacks=[OnExceptionCheckpoint(folder)])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(Fails(), loader())


def test_a_file_that_ranks_save_alone_names_the_runs_too(pool: Any, tmp_path: Path) -> None:
    pool.run(saved_by_each_rank_alone, tmp_path, group=False)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["loggers"]["Service"]["run_id"] > 0


class Continues(Recording):
    """A run of its own in each fit, unless a checkpoint names one."""

    runs = 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.version = folder, Continues.runs  # type: ignore[misc, assignment]
        Continues.runs += 1

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]  # type: ignore[misc]


def test_checkpoints_of_a_resumed_fit_go_beside_those_of_the_run_that_its_logger_continues(tmp_path: Path) -> None:
    first = ModelCheckpoint()
    trainer(tmp_path, Continues(tmp_path), callbacks=[first]).fit(Net(), loader())
    second = ModelCheckpoint()
    resumed = trainer(tmp_path, Continues(tmp_path), callbacks=[second], max_epochs=2)
    resumed.fit(Net(), loader(), ckpt_path=first.best_model_path)
    assert Path(second.best_model_path).parent == Path(first.best_model_path).parent
