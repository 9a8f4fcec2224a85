"""A fit that resumes from the newest checkpoint of its program continues the numbered run of its loggers."""

from __future__ import annotations

import csv
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger, TensorBoardLogger


class Logs(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Fails(Callback):
    """Ends the fit by an exception, as a kill would, after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.after:
            trainer.loggers[0].save()
            raise RuntimeError("on purpose")


def fit(folder: Path, after: int = 0, ckpt_path: Any = None, every: int = 1, **arguments: Any) -> Trainer:
    saves = ModelCheckpoint(arguments.pop("dirpath", None), every_n_train_steps=2)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[saves, Fails(after)], log_every_n_steps=every, **{"logger": "csv", **arguments},
    )  # fmt: skip
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.arange(10.0).reshape(5, 2)), 1)
    if after:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(Logs(), data, ckpt_path=ckpt_path)
    else:
        trainer.fit(Logs(), data, ckpt_path=ckpt_path)
    return trainer


def rows(folder: Path, version: int) -> list[dict[str, str]]:
    [path] = folder.rglob(f"version_{version}/metrics.csv")
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("how", ["last", "auto"])
@pytest.mark.parametrize("every", [1, 3, 5], ids=["rows", "a row", "no row before the checkpoint"])
def test_the_run_continues_and_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, how: str, every: int
) -> None:
    fit(tmp_path / "whole", every=every)
    monkeypatch.setenv("DRIVETRAIN_RESUME", how if how == "auto" else "")
    path = "last" if how == "last" else None
    for after in (5, 7, 0):
        with caplog.at_level("INFO"):
            resumed = fit(tmp_path / "cut", after, path, every)
    assert Path(str(resumed.log_dir)).name == "version_0"
    assert [each.name for each in (tmp_path / "cut").rglob("version_*")] == ["version_0"]
    assert rows(tmp_path / "cut", 0) == rows(tmp_path / "whole", 0)
    root = tmp_path / "cut" / "lightning_logs"
    assert caplog.messages.count(f"CSVLogger continues version_0 in {root}.") == 2


def test_events_of_tensorboard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from drivetrain.loggers import _event_file

    monkeypatch.setattr(_event_file, "_NUMBERS", itertools.count(8))  # files of one second, which 9 and 10 order
    for every, (folder, ends) in [(1, ("rows", (5, 7, 0))), (5, ("no row", (7, 0)))]:
        for after in ends:
            resumed = fit(tmp_path / folder, after, "last", every, logger="tensorboard")
        events = EventAccumulator(str(resumed.log_dir)).Reload()
        assert [event.step for event in events.Scalars("loss_step")] == [*range(every - 1, 10, every)]
        assert [each.name for each in (tmp_path / folder).rglob("version_*")] == ["version_0"]


def test_other_fits_number_a_new_run(tmp_path: Path) -> None:
    """A fit from the start, one that resumes from a path, and one whose number was read before."""
    first = fit(tmp_path, 5)
    path = str(first.checkpoint_callback.best_model_path)
    assert [Path(str(fit(tmp_path, 5, each).log_dir)).name for each in (None, path)] == ["version_1", "version_2"]
    logger = CSVLogger(tmp_path)
    assert logger.version == 3
    assert Path(str(fit(tmp_path, 0, "last", logger=logger).log_dir)).name == "version_3"
    assert [row["step"] for row in rows(tmp_path, 2)] == ["3"]  # the row of the checkpoint, again


def test_each_logger_continues_its_own_run(tmp_path: Path) -> None:
    fit(tmp_path, 5)
    for after in (5, 0):
        loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path, name="events")]
        fit(tmp_path, after, "last" if not after else None, logger=loggers)
    assert [each.version for each in loggers] == [1, 0]


def test_it_continues_after_the_folder_of_all_runs_was_moved(tmp_path: Path) -> None:
    fit(tmp_path / "a", 5)
    fit(tmp_path / "a", 5)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert Path(str(fit(tmp_path / "b", 0, "last").log_dir)) == tmp_path / "b" / "lightning_logs" / "version_1"


def test_it_continues_with_checkpoints_elsewhere_but_not_in_another_root(tmp_path: Path) -> None:
    fit(tmp_path / "other", 5)  # has a version_0, too
    for folder, name in (("own", "version_0"), ("other", "version_1")):
        fit(tmp_path / "own", 5, dirpath=tmp_path / folder)
        log_dir = fit(tmp_path / folder, 0, "last", dirpath=tmp_path / folder).log_dir
        assert Path(str(log_dir)) == tmp_path / folder / "lightning_logs" / name
